"""Progress: a run's position and due actions follow from the numbers in a checkpoint."""

import pytest

from diffusion_training.order import Order
from diffusion_training.training.progress import Progress


def progress_at(
    global_step=0, images_seen=0, skipped=0, num_images=10, per_micro=2, accumulation=2
):
    state = {
        "global_step": global_step,
        "data_step": global_step + skipped,
        "images_seen": images_seen,
    }
    return Progress({**state, "settings": {}}, num_images, per_micro, accumulation)


def walk(progress, count):
    """Steps, as (images, micro-batches) each."""
    steps = []
    for _ in range(count):
        step = progress.next_step()
        steps.append((step.images, step.micro_batches))
        progress.advance(step.images, stepped=True)
    return steps


def test_the_last_step_of_an_epoch_takes_the_remaining_images():
    progress = progress_at(num_images=11)
    assert progress.images_per_step == 4 and progress.last_step(2) == 6
    assert walk(progress, 6) == [(4, 2), (4, 2), (3, 2), (4, 2), (4, 2), (3, 2)]
    assert (progress.epoch, progress.images_seen) == (2, 22)
    assert walk(progress_at(num_images=3, per_micro=4), 2) == [(3, 1), (3, 1)]
    # Resumed in the middle, with steps of another size: the epoch still ends where it ends.
    assert walk(progress_at(2, 8, num_images=11, per_micro=2, accumulation=1), 3) == [
        (2, 1),
        (1, 1),
        (2, 1),
    ]


def test_last_step_counts_epochs_from_the_current_position():
    assert progress_at(3, 10).last_step(1) == 3 and progress_at(3, 10).last_step(3) == 9
    assert progress_at(2, 8).last_step(1) == 3  # 2 images are left
    assert progress_at(9, 30).last_step(1) == 3 < 9  # there is nothing left to train
    assert progress_at(2, 8, skipped=1).last_step(1) == 4  # a skipped step used its images
    for step, epochs in ((3, 1), (4, 2), (6, 2), (7, 3)):
        assert progress_at(2, 8).num_epochs(step) == epochs


def test_is_due_counts_steps_or_epochs():
    progress, due = progress_at(), []
    assert not progress.is_due(1) and progress.is_due(None, 1)  # no step has been done yet
    for _ in range(9):
        progress.advance(progress.next_step().images, stepped=True)
        due.append(
            (
                progress.is_due(3),
                progress.is_due(None, 1),
                progress.is_due(None, 2),
                progress.is_due(4, 1),
            )
        )
    steps = [{i for i, row in enumerate(due, 1) if row[kind]} for kind in range(4)]
    assert steps == [{3, 6, 9}, {3, 6, 9}, {6}, {4, 8}]  # steps override the epochs
    assert not progress.is_due(None)


def test_a_skipped_step_advances_only_the_data():
    progress = progress_at(3, 10, per_micro=5, accumulation=1)
    assert progress.is_due(3) and progress.is_due(None, 1)
    progress.advance(5, stepped=False)
    assert progress.state() == {"global_step": 3, "data_step": 4, "images_seen": 15}
    assert not progress.is_due(3)  # it was due before
    progress.advance(5, stepped=False)
    assert progress.is_due(None, 1) and progress.epoch == 2  # an epoch has ended nevertheless
    progress.advance(5, stepped=True)
    assert progress.state() == {
        "global_step": 4,
        "data_step": 6,
        "images_seen": 25,
    } and progress.is_due(4)


def test_fp16_overflows_are_allowed_at_the_start_and_too_many_end_the_run():
    progress = progress_at(per_micro=1)
    for _ in range(50):
        progress.advance(1, stepped=False)
    with pytest.raises(
        SystemExit, match="51 of 51 fp16 steps overflowed: use bf16 or a lower --learning_rate"
    ):
        progress.advance(1, stepped=False)
    progress = progress_at(9950, 9950, skipped=50)
    for _ in range(99):
        progress.advance(1, stepped=False)
        progress.advance(1, stepped=True)
    with pytest.raises(SystemExit, match="fp16 steps overflowed"):
        for _ in range(9):
            progress.advance(1, stepped=False)
    progress = progress_at(10048, 10048, skipped=151)
    progress.advance(1, stepped=False)  # 152 of 10,200 is the maximum
    with pytest.raises(SystemExit, match="153 of 10201 fp16 steps overflowed"):
        progress.advance(1, stepped=False)


def test_progress_continues_from_its_state():
    progress = progress_at()
    walk(progress, 4)
    again = Progress(progress.state(), 10, 2, 2)
    assert walk(progress, 7) == walk(again, 7) and progress.state() == again.state()


def test_state_has_cuts_only_for_orders_of_several_sizes():
    start = {"global_step": 0, "data_step": 0, "images_seen": 0}
    squares, two = Order(range(9), 0), Order(range(9), 0, [(8, 8), (8, 16), (8, 8)] * 3)
    assert Progress(start, 9, 2, 2, squares).state() == Progress(start, 9, 2, 2).state() == start
    state = Progress(start, 9, 2, 2, two).state()
    assert state == {**start, "cuts": (4, 2)} == Progress(state, 9, 3, 1, two).state()


def test_is_due_every_step_begins_after_the_first_step():
    progress = progress_at()
    progress.advance(4, stepped=True)
    assert progress.is_due(1)
