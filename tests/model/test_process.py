"""Settings of the whole process: in order whatever the order in which threads come and go."""

import sys
import threading
import time
from contextlib import contextmanager, nullcontext

import pytest
import transformers
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

from ffmem.indexing.worker import SWITCH, turns
from ffmem.model.loading import quiet_transformers
from ffmem.model.process import Shared, alone


def test_threads_take_turns_at_one_that_they_make_differently_and_one_may_nest_it():
    entered, order = threading.Event(), []

    def other():
        entered.set()
        with alone(nullcontext()):
            order.append("other")

    thread = threading.Thread(target=other)
    with alone(nullcontext()), alone(nullcontext()):
        thread.start()
        entered.wait()
        thread.join(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "other"]


def test_how_attention_is_computed_is_as_before_after_many_threads_changed_it():
    def flags():
        return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()

    before, seen, start = flags(), [], threading.Barrier(6)

    def other(backend):
        start.wait()
        for _ in range(20):
            with alone(sdpa_kernel([backend])):
                time.sleep(0)  # another thread's turn
                seen.append((backend, flags()))

    threads = [threading.Thread(target=other, args=(one,)) for one in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION) * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert flags() == before
    assert set(seen) == {
        (SDPBackend.MATH, (False, False, True, False)),
        (SDPBackend.FLASH_ATTENTION, (True, False, False, False)),
    }


@pytest.mark.parametrize(
    ("setting", "now", "inside"),
    [
        (lambda: turns("cuda"), sys.getswitchinterval, SWITCH),
        (quiet_transformers, transformers.logging.is_progress_bar_enabled, False),
        (quiet_transformers, transformers.logging.get_verbosity, transformers.logging.ERROR),
    ],
    ids=["turns", "bars", "verbosity"],
)
def test_the_last_to_leave_puts_back_what_the_first_found(setting, now, inside):
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.INFO)
    try:
        before = now()
        assert before != inside
        first, second = setting(), setting()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert now() == pytest.approx(inside)
        second.__exit__(None, None, None)
        assert now() == before
    finally:
        transformers.logging.set_verbosity(level)


def test_a_setting_that_cannot_be_made_is_tried_again_and_one_of_the_cpu_is_none():
    tries = []

    @Shared
    @contextmanager
    def failing():
        tries.append(len(tries))
        if len(tries) == 1:
            raise LookupError("not yet")
        yield

    with pytest.raises(LookupError), failing():
        pass
    with failing(), failing():
        assert tries == [0, 1]
    before = sys.getswitchinterval()
    with turns("cpu"):
        assert sys.getswitchinterval() == before
