"""Shapes are checked in every test: jaxtyping's annotations are enforced by beartype."""

import os
import signal
import threading

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shell starts `make test &` with interrupts ignored, which every program that a test starts would inherit.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from jaxtyping import install_import_hook

install_import_hook("ffmem", "beartype.beartype")

import hypothesis
import pytest
import torch
import transformers

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported

from tests.tiny import tiny_model, word_tokenizer

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
hypothesis.settings.register_profile("shared machines", deadline=None)
hypothesis.settings.load_profile("shared machines")


@pytest.fixture(scope="session")
def tokenizer():
    return word_tokenizer()


@pytest.fixture(scope="session")
def gpt2(tokenizer):
    """A tiny random GPT-2 with its memories found."""
    from ffmem import load_model

    return load_model(tiny_model("gpt2"), tokenizer=tokenizer)


@pytest.fixture(scope="session")
def llama(tokenizer):
    """A tiny random Llama: gated, so its coefficients go below zero."""
    from ffmem import load_model

    return load_model(tiny_model("llama"), tokenizer=tokenizer)


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory, tokenizer):
    """The tiny GPT-2 saved as a folder, as a user has one."""
    folder = tmp_path_factory.mktemp("models") / "tiny-gpt2"
    tiny_model("gpt2").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def text_file(tmp_path):
    """A short text of several paragraphs whose words the tiny tokenizer knows."""
    from tests.tiny import some_text

    path = tmp_path / "text.txt"
    path.write_text(some_text(60), "utf-8")
    return path


@pytest.fixture(scope="session")
def built(llama, tmp_path_factory):
    """A finished run of a gated model, with negatives, statistics and values. Tests must not change it."""
    from ffmem import build_index, values
    from tests.tiny import some_sentences

    run = tmp_path_factory.mktemp("built") / "run"
    build_index(llama, some_sentences(50, seed=11), out=run, unit="line", top=6, quiet=True)
    values(run, llama, top=12, quiet=True)
    return run


SLOW_FIXTURES = {"cluster", "compiled", "server", "store"}
"""A Ray cluster, kernels compiled for a GPU, and an S3 server with a store in it."""


def pytest_collection_modifyitems(items):
    """Mark every test that asks for one of these as slow, in whatever file it is; and those of a store's kind `s3`."""
    for item in items:
        kinds = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if SLOW_FIXTURES.intersection(getattr(item, "fixturenames", ())) or any(kind == "s3" for kind in kinds):
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def short_folder():
    """A folder with a short name, for programs such as Ray that put sockets into it."""
    import shutil
    import tempfile

    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
