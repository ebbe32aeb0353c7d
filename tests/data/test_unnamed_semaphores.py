"""Queues, semaphores and events of processes that are spawned."""

import queue

import pytest

from torchtitan_clone.data.unnamed_semaphores import UnnamedContext


def answer(questions, answers, event):
    """Answers each question with its square until the event is set."""
    while not event.is_set():
        try:
            answers.put(questions.get(timeout=0.05) ** 2)
        except queue.Empty:
            continue


def test_queues_and_events_of_spawned_processes():
    context = UnnamedContext()
    questions, answers, event = context.Queue(), context.Queue(), context.Event()
    processes = [context.Process(target=answer, args=(questions, answers, event)) for _ in range(2)]
    for process in processes:
        process.start()
    for number in range(200):
        questions.put(number)
    assert sorted(answers.get(timeout=60) for _ in range(200)) == [number**2 for number in range(200)]
    event.set()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0


def test_a_semaphore_counts():
    semaphore = UnnamedContext().BoundedSemaphore(2)
    assert [semaphore.acquire(timeout=0.01), semaphore.acquire(False), semaphore.acquire(False)] == [True, True, False]
    assert not semaphore.acquire(timeout=0.01)
    semaphore.release()
    with semaphore:
        assert not semaphore.acquire(False)
    assert semaphore.acquire(False)
    with pytest.raises(queue.Empty):
        UnnamedContext().Queue().get(timeout=0.01)
