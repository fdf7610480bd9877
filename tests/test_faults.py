"""A rank fails or is gone: the others end, and say which one it was, what it did and how far it was."""

import faulty
import pytest


@pytest.mark.parametrize(
    ("fault", "rank", "phase", "ranks"),
    [
        ("killed", 1, "training", 3),
        ("killed", 0, "training", 2),  # it also has the store through which ranks hear of each other
        ("killed", 1, "validation", 2),
        ("raises", 1, "saving a checkpoint", 2),
        ("raises", 0, "training", 2),
        ("terminated", 1, "training", 2),
        ("stopped", 1, "training", 2),
        ("stopped", 0, "training", 2),  # then nothing that asks the store gets an answer
        ("stopped", 0, "validation", 3),  # the others wait in a metric's collective, for each other as it seems
    ],
)
def test_the_others_end_with_an_error_that_names_the_rank(fault, rank, phase, ranks):
    for said in faulty.run(fault, rank, phase, 10, ranks).values():
        assert f"in {phase} after optimizer step" in said


def test_faults_at_random_moments():
    faulty.run("killed", 1, "any", 0.7, 2)
