"""Tokens behind triggers: against the reader's own triggers, one by one."""

import numpy as np
import pytest

from ffmem import build_index, load_model
from ffmem.experiments.next_tokens import end_token, next_tokens, token_at, token_counts
from tests.tiny import some_sentences, tiny_model

T = 5


def one_by_one(index, layer, sign, end):
    """Next and last token of every trigger, by way of the reader's objects and the sentences as lists."""
    sentences = {row["sentence"]: row["tokens"] for row in index.table("sentences").to_pylist()}
    ids, last = [], []
    for view in index:
        if view.cell.layer != layer:
            continue
        triggers = view.triggers if sign == "+" else view.negative_triggers
        tokens = [sentences[trigger.sentence] for trigger in triggers]
        after = [
            (row[trigger.position] if trigger.position < len(row) else -1 if end is None else end)
            for row, trigger in zip(tokens, triggers, strict=True)
        ]
        before = [row[trigger.position - 1] for row, trigger in zip(tokens, triggers, strict=True)]
        ids.append(after + [-1] * (T - len(after)))
        last.append(before + [-1] * (T - len(before)))
    return np.array(ids), np.array(last)


@pytest.fixture(scope="module")
def index(llama, tmp_path_factory):
    """A gated run of layers 1 and 3, with sentences in many batches."""
    run = tmp_path_factory.mktemp("next") / "run"
    sentences = some_sentences(40, seed=3)
    return build_index(llama, sentences, out=run, unit="line", top=T, layers="1,3", shard_tokens=60, quiet=True)


@pytest.mark.parametrize("end", [None, 0])
@pytest.mark.parametrize("sign", ["+", "-"])
@pytest.mark.parametrize("layer", [1, 3])
@pytest.mark.slow
def test_next_and_last_tokens_are_those_of_the_triggers_one_by_one(index, layer, sign, end):
    assert len(index.table("sentences").column("tokens").chunks) > 2
    found = next_tokens(index, layer, sign, end)
    ids, last = one_by_one(index, layer, sign, end)
    assert found.cells == 64
    assert found.ids.tolist() == ids.tolist()
    assert found.last.tolist() == last.tolist()
    assert found.counts.tolist() == (last >= 0).sum(1).tolist()
    assert found.with_next.tolist() == (ids >= 0).sum(1).tolist()
    assert found.ended == ((one_by_one(index, layer, sign, None)[0] < 0) & (last >= 0)).sum() > 0


def test_cells_that_never_fire_have_no_triggers_and_no_tokens(tokenizer, tmp_path):
    network = tiny_model("gpt2-relu")
    network.transformer.h[1].mlp.c_fc.bias.data[[0, 7, 127]] = -1000.0
    model = load_model(network, tokenizer=tokenizer)
    index = build_index(model, some_sentences(6), out=tmp_path / "run", unit="line", top=T, quiet=True)
    found = next_tokens(index, 2, end=0)
    assert (found.counts == 0).nonzero()[0].tolist() == [
        view.cell.index for view in index if view.cell.layer == 2 and not view.triggers
    ]
    assert found.counts[[0, 7, 127]].tolist() == [0, 0, 0]
    assert (found.ids[[0, 7, 127]] == -1).all()
    assert not found.at_end[[0, 7, 127]].any()
    assert found.ids.tolist() == one_by_one(index, 2, "+", 0)[0].tolist()
    assert not next_tokens(index, 2, "-", end=0).counts.any()  # the run did not look


def test_a_layer_where_nothing_fires_at_all_is_read_as_empty(tokenizer, tmp_path):
    network = tiny_model("gpt2-relu")
    for block in network.transformer.h:
        block.mlp.c_fc.bias.data[:] = -1000.0
    model = load_model(network, tokenizer=tokenizer)
    index = build_index(model, ["the king left ."], out=tmp_path / "run", top=T, quiet=True)
    found = next_tokens(index, 3)
    assert found.ids.shape == (128, T)
    assert (found.ids == -1).all()
    assert found.ended == 0


def test_a_token_is_found_in_its_row_and_nothing_behind_its_end(index):
    rows = index.table("sentences").column("tokens").to_pylist()
    row = np.arange(len(rows)).repeat(30)
    position = np.tile(np.arange(30), len(rows))
    wanted = [(rows[r][p] if p < len(rows[r]) else -1) for r, p in zip(row.tolist(), position.tolist(), strict=True)]
    order = np.random.default_rng(0).permutation(len(row))
    assert token_at(index, row[order], position[order]).tolist() == np.array(wanted)[order].tolist()


@pytest.mark.parametrize("end", [None, 0])
def test_tokens_are_counted_over_the_kept_sentences_and_the_mark_once_behind_each(index, end):
    rows = index.table("sentences").column("tokens").to_pylist()
    wanted = [sum(row.count(id) for row in rows) for id in range(101)]
    wanted[0] += len(rows) if end == 0 else 0
    assert token_counts(index, 101, end).tolist() == wanted


def test_only_the_paper_s_model_has_a_mark_behind_a_sentence_and_none_behind_a_window(index, llama, tokenizer, tmp_path):
    adaptive = load_model(tiny_model("adaptive_lm"), tokenizer=tokenizer)
    lines = build_index(adaptive, ["the king left ."], out=tmp_path / "lines", unit="line", quiet=True)
    windows = build_index(adaptive, ["the king left ."], out=tmp_path / "windows", unit="window:3", quiet=True)
    assert end_token(llama, index) is None
    assert end_token(adaptive, lines) == tokenizer.eos_token_id == 0
    assert end_token(adaptive, windows) is None
