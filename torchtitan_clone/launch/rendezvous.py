"""Rendezvous of a fixed number of nodes at a store that node 0 serves at one address.

torch's "c10d" rendezvous unpickles what it finds in its store, and both it and "static" listen at all addresses.
"""

from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from torchtitan_clone.network import serve_store

TIMEOUT = timedelta(seconds=900)


class StaticRendezvous(RendezvousHandler):
    """Connects the launchers of all nodes; the workers use the same store.

    Node 0 listens at `listen_address`; the others connect to `master_address`. Port 0 picks a free one, for one node.
    """

    def __init__(self, *, node: int, nodes: int, listen_address: str, master_address: str, port: int):
        self._node = node
        self._nodes = nodes
        self._listen_address = listen_address
        self._master_address = master_address
        self._port = port
        self._store: Store | None = None  # must outlive the workers

    def get_backend(self) -> str:
        return "static"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns this node's place once all nodes have connected. RendezvousConnectionError if it cannot listen."""
        try:
            store = self._open_store()
        except OSError as error:
            raise RendezvousConnectionError(str(error)) from error
        self._store = store
        place = RendezvousStoreInfo(self._listen_address if self._node == 0 else self._master_address, store.port)
        return RendezvousInfo(PrefixStore("launcher", store), self._node, self._nodes, place)

    def _open_store(self) -> TCPStore:
        if self._node == 0:
            return serve_store(self._listen_address, port=self._port, clients=self._nodes, timeout=TIMEOUT)
        return TCPStore(self._master_address, self._port, self._nodes, is_master=False, timeout=TIMEOUT)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Does nothing: the workers are not restarted."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "torchtitan_clone"

    def shutdown(self) -> bool:
        return True
