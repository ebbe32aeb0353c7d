"""How a run joins the other replica groups."""

import math

from torchtitan_clone.checkpoint.folder import newest_complete_step
from torchtitan_clone.checkpoint.manager import CheckpointManager
from torchtitan_clone.config import Config
from torchtitan_clone.network import LOOPBACK
from torchtitan_clone.parallel.gradients import sum_over_ranks
from torchtitan_clone.parallel.runtime import choose_run_interface
from torchtitan_clone.replicas.protocol import ReplicaContext, ReplicaGroup, join_replica_group, replica_groups
from torchtitan_clone.run.plan import RunPlan, replica_identity
from torchtitan_clone.run.state import RunState
from torchtitan_clone.run.stopping import StopPolicy, Timeouts


def join_run(
    plan: RunPlan, *, state: RunState, checkpoints: CheckpointManager, timeouts: Timeouts, stop: StopPolicy
) -> ReplicaGroup:
    """Joins the replica groups of the run, or returns the only one."""
    config = plan.config
    if config.fault_tolerance.enable:
        _warm_up(state)

    def should_stop() -> bool:
        timeouts.beat()  # waiting for other groups is not a hang
        return stop.is_wanted_here()

    context = ReplicaContext(
        device=state.engine.device,
        address=_own_address(config) if config.fault_tolerance.enable else LOOPBACK,
        step=state.progress.commits,
        parameters=state.engine.parameters,
        names=list(plan.parameters),
        outer_weights=state.outer_weights,
        recovery_state=lambda: state.recovery_state(before_load=checkpoints.wait_for_staging),
        sum_over_ranks=sum_over_ranks,
        is_run_complete=lambda: (newest_complete_step(plan.checkpoint_folder) or 0) >= config.training.steps,
        should_stop=should_stop,
        identity=replica_identity(plan),
        folder=plan.output_folder,
    )
    return join_replica_group(config.fault_tolerance, run=context)


def wait_for_peers(plan: RunPlan) -> str | None:
    """Returns the host where replica groups meet, once it answers; None without them. NoAnswerError."""
    options = plan.config.fault_tolerance
    if not options.enable:
        return None
    # A group of a run that has begun waits as long as the others do; before that, the address may be wrong.
    has_begun = any(plan.folder.glob("replica-*/rows.rank*.jsonl"))
    return replica_groups().wait_for_peers(seconds=math.inf if has_begun else options.process_group_timeout_ms / 1000)


def _own_address(config: Config) -> str:
    host = replica_groups().peers_host()
    interface = choose_run_interface(config.comm, peers_host=host)
    if interface is None:
        raise RuntimeError(f"there is no route to the lighthouse at {host}")
    return interface.address


def _warm_up(state: RunState) -> None:
    """Runs forward and backward once and drops the gradients, so that no other group waits for a compilation."""
    config = state.engine.plan.config
    options = config.fault_tolerance
    batch = state.loader.next_batch(replica_index=options.replica_id, num_replicas=options.group_size)
    first = next(iter(batch.microbatches(config.training.local_batch_size)))
    state.engine.forward_backward([first.to(state.engine.device)], num_targets=1)
    state.engine.optimizer.zero_grad()
