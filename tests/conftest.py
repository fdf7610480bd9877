import os
import threading

import hypothesis
import pytest
import torch

import lightning_mqgnn  # noqa: F401  (registers the strategies)

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=60)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
torch.set_num_threads(1)  # kernels as small as these only wait for each other where cores are few
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mqgnn-")]


@pytest.fixture(autouse=True)
def _no_thread_left_behind():
    yield
    assert our_threads() == []
