"""The softmax put into a layer: against feed-forward layers written out by hand, and layers whose answer is known."""

import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.activations import ACT2FN

from ffmem import build_index, load_model
from ffmem.errors import CorpusError, ModelError, RunError
from ffmem.experiments.examples import Example, Examples, sample_examples
from ffmem.experiments.questions.normaliser import _feeds, batch_losses, normaliser
from ffmem.experiments.substitution import (
    Factors,
    effective_memories,
    recorded,
    replayed,
    softmax,
    softmax_scaled,
    substituted,
)
from ffmem.run.results import load_result
from tests.tiny import UNKNOWN, VARIANTS, some_sentences, tiny_model

MODULE = sys.modules[normaliser.__module__]


def hooks_of(model):
    return [hook for part in model.model.modules() for hook in (*part._forward_hooks, *part._forward_pre_hooks)]


def built(model, path, *, count=14, **settings):
    return build_index(
        model, some_sentences(count, seed=1, longest=8), out=path / "run", unit="line", quiet=True, **settings
    )


def by_hand(variant, model, layer, scaled):
    """Write one block's feed-forward layer out with a softmax; returns what puts it back."""
    block = model.blocks[layer - 1]

    def new(scores, up=None):
        weights = torch.exp(scores - scores.max(-1, keepdim=True).values)
        weights = weights / weights.sum(-1, keepdim=True)
        return weights if up is None else weights * up

    def as_long(new, m):
        return new * (m.pow(2).sum(-1, keepdim=True) / new.pow(2).sum(-1, keepdim=True)).sqrt() if scaled else new

    if variant.startswith("gpt2"):
        owner, mlp = block.mlp, block.mlp

        def forward(x):
            scores = mlp.c_fc(x)
            return mlp.c_proj(as_long(new(scores), mlp.act(scores)))

    elif variant == "phi3":
        owner, mlp = block.mlp, block.mlp

        def forward(x):
            both = mlp.gate_up_proj(x)
            gate, up = both[..., : both.shape[-1] // 2], both[..., both.shape[-1] // 2 :]
            return mlp.down_proj(as_long(new(gate, up), torch.nn.functional.silu(gate) * up))

    elif variant in ("llama", "gemma2"):
        owner, mlp = block.mlp, block.mlp

        def forward(x):
            gate, up = mlp.gate_proj(x), mlp.up_proj(x)
            return mlp.down_proj(as_long(new(gate, up), mlp.act_fn(gate) * up))

    else:  # ReLU between fc1 and fc2, inside the block
        owner = block.fc1
        original = block.fc1.forward

        def forward(x):
            scores = original(x)
            # The ReLU behind it leaves a softmax as it is.
            return as_long(new(scores), torch.relu(scores))

    owner.forward = forward
    return lambda: delattr(owner, "forward")


def loss_alone(model, examples, bos):
    """Every example in a forward of its own, the model's own logits, a token at a time."""
    losses = []
    for example in examples.examples:
        ids = ([model.bos] if bos else []) + example.ids.tolist()
        if len(ids) < 2:
            continue
        with torch.no_grad():
            log_probs = torch.log_softmax(model.model(input_ids=torch.tensor([ids])).logits[0].double(), dim=-1)
        losses += [-float(log_probs[at, ids[at + 1]]) for at in range(len(ids) - 1)]
    return sum(losses) / len(losses), len(losses)


@pytest.mark.parametrize("bos", ["on", "off"])
@pytest.mark.parametrize(
    "variant", ["gpt2", "gpt2-relu", "llama", "phi3", "gemma2", "adaptive_lm", "opt", "opt-post-norm-projected"]
)
@pytest.mark.slow
def test_losses_are_those_of_feed_forward_layers_written_out_by_hand(variant, bos, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(MODULE.BATCH_TOKENS, "cpu", 60)
    model = load_model(tiny_model(variant), tokenizer=tokenizer)
    # Larger weights, so that a softmax is neither flat nor the same as what it stands for.
    with torch.no_grad():
        for block in model.blocks:
            for parameter in block.parameters():
                parameter.mul_(2)
    index = built(model, tmp_path, bos=bos)
    result = normaliser(model, index, examples=9, seed=3, quiet=True)
    examples = sample_examples(model, index, count=9, seed=3, quiet=True)
    base, tokens = loss_alone(model, examples, bos == "on")
    assert result.facts["loss"] == pytest.approx(base, rel=1e-5)
    assert result.facts["tokens_predicted"] == tokens
    changes = []
    for name, scaled in (("softmax", False), ("softmax_scaled", True)):
        for row in result.rows:
            put_back = by_hand(variant, model, row["layer"], scaled)
            expected, _ = loss_alone(model, examples, bos == "on")
            put_back()
            assert row[f"loss_{name}"] == pytest.approx(expected, rel=1e-5)
            assert row[f"change_{name}"] == pytest.approx(expected - base, abs=5e-5)
            changes.append(abs(expected - base))
        put_back_all = [by_hand(variant, model, layer, scaled) for layer in range(1, model.layers + 1)]
        expected, _ = loss_alone(model, examples, bos == "on")
        for put_back in put_back_all:
            put_back()
        assert result.facts[f"loss_{name}_all"] == pytest.approx(expected, rel=1e-5)
    assert loss_alone(model, examples, bos == "on")[0] == base
    assert max(changes) > 5e-3


@pytest.mark.parametrize("variant", [*VARIANTS, *UNKNOWN])
@pytest.mark.slow
def test_in_every_family_the_factors_make_the_coefficients(variant, tokenizer):
    """The key's output under some activation, times up, is what enters the value matrix: gate and up are not mixed up."""
    model = load_model(tiny_model(variant), tokenizer=tokenizer)
    seen = []
    ids = torch.arange(1, 8)[None]
    with substituted(model, range(1, model.layers + 1), seen.append), torch.inference_mode():
        model.model(input_ids=ids, use_cache=False)
    assert [factors.layer for factors in seen] == list(range(1, model.layers + 1))
    for factors in seen:
        assert (factors.up is not None) == model.family.gated
        up = 1 if factors.up is None else factors.up
        options = [ACT2FN[name](factors.scores) * up for name in ("relu", "relu2", "gelu", "gelu_new", "silu")]
        assert any(torch.allclose(option, factors.m, atol=1e-6) for option in options)
    assert not hooks_of(model)


def test_scores_are_those_in_front_of_an_activation_that_works_in_place(tokenizer):
    model = load_model(tiny_model("gpt2-relu"), tokenizer=tokenizer)
    model.blocks[0].mlp.act = torch.nn.ReLU(inplace=True)
    seen = []
    with substituted(model, [1], seen.append), torch.inference_mode():
        model.model(input_ids=torch.arange(1, 8)[None], use_cache=False)
    assert (seen[0].scores < 0).any()
    assert torch.equal(seen[0].scores.relu(), seen[0].m)


@pytest.mark.parametrize("variant", ["gpt2", "llama", "phi3", "adaptive_lm", "bloom"])
@pytest.mark.slow
def test_the_original_coefficients_given_back_leave_the_loss_as_it_is_bit_for_bit(variant, tokenizer, tmp_path):
    model = load_model(tiny_model(variant), tokenizer=tokenizer)
    index = built(model, tmp_path)
    feeds = _feeds(sample_examples(model, index, count=10, quiet=True), model, True)
    untouched = [batch_losses(model, feed).tolist() for feed in feeds]
    with substituted(model, range(1, model.layers + 1), lambda factors: factors.m.clone()):
        assert [batch_losses(model, feed).tolist() for feed in feeds] == untouched
    with substituted(model, range(1, model.layers + 1), lambda factors: None):
        assert [batch_losses(model, feed).tolist() for feed in feeds] == untouched
    with substituted(model, [1], lambda factors: factors.m * 2):
        assert [batch_losses(model, feed).tolist() for feed in feeds] != untouched
    assert [batch_losses(model, feed).tolist() for feed in feeds] == untouched


def relu_model(tokenizer, *, cells, keys):
    """A random GPT-2 with ReLU and few cells, its keys filled by `keys(weight, bias)`."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_inner=cells,
        activation_function="relu",
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for block in model.transformer.h:
            block.mlp.c_proj.weight.normal_()
            keys(block.mlp.c_fc.weight, block.mlp.c_fc.bias)
    return load_model(model, tokenizer=tokenizer)


def test_a_layer_of_one_cell_is_a_neural_memory_once_its_length_is_given_back(tokenizer, tmp_path):
    # softmax of one score is 1, whatever it is; given the length of m ≥ 0 it is m again.
    model = relu_model(tokenizer, cells=1, keys=lambda weight, bias: bias.fill_(0.5))
    result = normaliser(model, built(model, tmp_path), examples=10, quiet=True)
    for row in result.rows:
        assert row["change_softmax_scaled"] == pytest.approx(0, abs=1e-6)
        assert abs(row["change_softmax"]) > 1e-3
        assert row["softmax_effective_q1"] == row["softmax_effective_q3"] == 1.0
        assert row["cells"] == 1
    assert result.facts["change_softmax_scaled_all"] == pytest.approx(0, abs=1e-6)


def test_equal_keys_are_all_in_use_under_both_and_only_lengths_tell_them_apart(tokenizer, tmp_path):
    def equal(weight, bias):
        weight.zero_()
        bias.fill_(2.0)  # m is 2 in each of 8 cells, softmax 1/8

    model = relu_model(tokenizer, cells=8, keys=equal)
    index = built(model, tmp_path)
    result = normaliser(model, index, examples=10, quiet=True)
    for row in result.rows:
        for name in ("effective_memories", "softmax_effective"):
            assert [row[f"{name}_{q}"] for q in ("q1", "median", "q3")] == pytest.approx([8, 8, 8], rel=1e-5)
        assert row["change_softmax_scaled"] == pytest.approx(0, abs=1e-5)
    # Without the length the values count a sixteenth: the same as values that are a sixteenth as long.
    examples = sample_examples(model, index, count=10, quiet=True)
    with torch.no_grad():
        model.model.transformer.h[1].mlp.c_proj.weight.div_(16)
    assert result.rows[1]["loss_softmax"] == pytest.approx(loss_alone(model, examples, True)[0], rel=1e-5)


def test_a_layer_that_never_fires_has_no_memory_in_use_and_stays_silent_when_scaled(tokenizer, tmp_path):
    def silent(weight, bias):
        weight.zero_()
        bias.fill_(-1.0)

    model = relu_model(tokenizer, cells=4, keys=silent)
    result = normaliser(model, built(model, tmp_path), some_sentences(10), examples=10, quiet=True)
    for row in result.rows:
        assert row["effective_memories_median"] == 0
        assert row["softmax_effective_median"] == pytest.approx(4)
        assert row["change_softmax_scaled"] == 0
        assert row["change_softmax"] != 0
    assert result.facts["without_any_memory"] == 2 * result.facts["tokens_watched"]


def test_values_of_zero_make_every_normaliser_the_same(tokenizer, tmp_path):
    model = relu_model(tokenizer, cells=8, keys=lambda weight, bias: weight.normal_())
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.c_proj.weight.zero_()
    result = normaliser(model, built(model, tmp_path), examples=10, quiet=True)
    assert {row[name] for row in result.rows for name in ("change_softmax", "change_softmax_scaled")} == {0.0}
    assert result.facts["change_softmax_all"] == 0


@pytest.mark.slow
def test_effective_memories_count_only_tokens_and_are_those_of_each_prefix_alone(llama, tmp_path):
    index = built(llama, tmp_path)
    result = normaliser(llama, index, examples=8, seed=2, quiet=True)
    examples = sample_examples(llama, index, count=8, seed=2, quiet=True)
    for row in result.rows:
        own, others = [], []
        for example in examples.examples:
            ids = torch.tensor([[llama.bos, *example.ids.tolist()]])
            with torch.no_grad():
                recording = llama.record(ids)
            mlp = llama.blocks[row["layer"] - 1].mlp
            x = []
            hook = mlp.register_forward_pre_hook(lambda _, args, x=x: x.append(args[0]))
            llama.logits(ids)
            hook.remove()
            with torch.no_grad():
                softened = torch.softmax(mlp.gate_proj(x[0]), -1) * mlp.up_proj(x[0])
            for kept, m in ((own, recording.m[row["layer"] - 1]), (others, softened)):
                for vector in m[0, 1:].double().abs():  # the beginning-of-sentence token is in no statistic
                    share = [float(part / vector.sum()) for part in vector if part > 0]
                    kept.append(math.exp(-sum(p * math.log(p) for p in share)))
        for name, kept in (("effective_memories", own), ("softmax_effective", others)):
            found = [row[f"{name}_{q}"] for q in ("q1", "median", "q3")]
            assert found == pytest.approx(np.quantile(kept, [0.25, 0.5, 0.75]).tolist(), rel=1e-4)
        assert result.facts["tokens_watched"] == len(own)


def test_the_rules_by_hand():
    scores = torch.tensor([[0.0, math.log(3.0)]])
    plain = Factors(1, scores, None, torch.tensor([[0.0, 5.0]]))
    assert softmax(plain).tolist() == [pytest.approx([0.25, 0.75])]
    assert softmax_scaled(plain).tolist() == [pytest.approx([5 / math.sqrt(10), 15 / math.sqrt(10)])]
    gated = Factors(1, scores, torch.tensor([[-4.0, 2.0]]), torch.tensor([[3.0, 4.0]]))
    assert softmax(gated).tolist() == [pytest.approx([-1.0, 1.5])]
    assert float(softmax_scaled(gated).norm()) == pytest.approx(5)
    closed = Factors(1, scores, torch.zeros(1, 2), torch.zeros(1, 2))
    assert softmax_scaled(closed).tolist() == [[0.0, 0.0]]
    assert effective_memories(torch.tensor([[1.0, 1.0, -1.0, 1.0], [0.0, 7.0, 0.0, 0.0]])).tolist() == pytest.approx([4, 1])


@pytest.mark.parametrize("variant", ["gpt2", "adaptive_lm"])
def test_logits_are_held_a_few_rows_at_a_time_and_each_target_has_its_own_loss(variant, tokenizer, tmp_path, monkeypatch):
    model = load_model(tiny_model(variant), tokenizer=tokenizer)
    feeds = _feeds(sample_examples(model, built(model, tmp_path), count=10, quiet=True), model, True)
    wanted = []
    for feed in feeds:
        with torch.no_grad():
            log_probs = torch.log_softmax(model.model(input_ids=feed.ids).logits.double(), -1)[feed.predicting]
        wanted += (-log_probs.gather(1, feed.targets.long()[:, None])[:, 0]).tolist()
    monkeypatch.setattr(sys.modules["ffmem.model.scores"], "CHUNK_ELEMENTS", 2 * model.vocabulary.size)
    widest = []
    original = type(model.vocabulary).pieces

    def counting(self, h, **options):
        widest.append(len(h))
        return original(self, h, **options)

    monkeypatch.setattr(type(model.vocabulary), "pieces", counting)
    found = [loss for feed in feeds for loss in batch_losses(model, feed).tolist()]
    assert found == pytest.approx(wanted, rel=1e-4)
    assert set(widest) <= {1, 2}
    assert sum(widest) == sum(len(feed.targets) for feed in feeds)


def test_feeds_predict_every_token_behind_the_first_column_once(gpt2):
    examples = Examples([Example(np.array(ids), "", None) for ids in ([5, 6, 7], [8], [9, 10, 11])], "by hand", 3)
    targets = sorted(token for feed in _feeds(examples, gpt2, True) for token in feed.targets.tolist())
    assert targets == [5, 6, 7, 8, 9, 10, 11]
    without = _feeds(examples, gpt2, False)
    assert sorted(token for feed in without for token in feed.targets.tolist()) == [6, 7, 10, 11]
    assert sum(int(feed.tokens.sum()) for feed in without) == 7
    for feed in _feeds(examples, gpt2, True):
        sources = feed.ids[feed.predicting].tolist()
        for source, target in zip(sources, feed.targets.tolist(), strict=True):
            assert target == source + 1 or source == gpt2.bos


def test_examples_that_predict_nothing_are_an_error(gpt2):
    with pytest.raises(CorpusError, match="two tokens or more"):
        _feeds(Examples([Example(np.array([5]), "", None)], "by hand", 1), gpt2, False)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_and_the_result_comes_back_from_its_file(gpt2, tmp_path):
    index = built(gpt2, tmp_path)
    before = gpt2.fingerprint()
    texts = [json.dumps(normaliser(gpt2, index, examples=6, seed=seed, quiet=True).as_dict()) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    normaliser(None, index, examples=6, seed=1, quiet=True)
    assert json.dumps(load_result(index, "normaliser").as_dict()) == texts[0]
    assert gpt2.fingerprint() == before
    assert not hooks_of(gpt2)


def test_fewer_examples_than_asked_are_told_and_an_eval_corpus_is_named(gpt2, tmp_path):
    index = built(gpt2, tmp_path, layers=[1, 3])
    result = normaliser(gpt2, index, some_sentences(5, seed=9), examples=400, quiet=True)
    assert result.settings["examples"] == 5
    assert result.settings["examples_asked"] == 400
    assert [row["layer"] for row in result.rows] == [1, 3]
    assert result.facts["layers_replaced_together"] == 3
    assert result.facts["loss_uniform"] == pytest.approx(math.log(gpt2.vocabulary.size))
    changes = [row["change_softmax"] for row in result.rows]
    assert result.facts["change_softmax_largest"] == max(changes)
    assert result.facts["change_softmax_largest_layer"] == [1, 3][int(np.argmax(changes))]


def test_another_model_than_the_runs_is_refused(gpt2, tokenizer, tmp_path):
    index = built(gpt2, tmp_path)
    with pytest.raises(RunError, match="was made with model"):
        normaliser(load_model(tiny_model("gpt2", seed=1), tokenizer=tokenizer), index, quiet=True)


def test_hooks_are_taken_off_after_an_error_in_the_middle_of_a_forward(gpt2, tmp_path):
    feeds = _feeds(sample_examples(gpt2, built(gpt2, tmp_path), count=4, quiet=True), gpt2, True)
    untouched = batch_losses(gpt2, feeds[0]).tolist()

    def fail(factors):
        if factors.layer == 2:
            raise ZeroDivisionError
        return factors.m * 0

    with pytest.raises(ZeroDivisionError), substituted(gpt2, [1, 2, 3], fail):
        batch_losses(gpt2, feeds[0]).tolist()
    assert not hooks_of(gpt2)
    assert batch_losses(gpt2, feeds[0]).tolist() == untouched


@pytest.mark.parametrize(
    ("key", "message"), [("mlp.dropout", "was not called in front"), ("ln_2", "to give a number a cell")]
)
def test_a_key_that_makes_no_coefficients_is_an_error_that_names_it(key, message, gpt2):
    wrong = replace(gpt2, family=replace(gpt2.family, key=key))
    with pytest.raises(ModelError, match=message), substituted(wrong, [1], softmax):
        wrong.logits(torch.tensor([[3, 4, 5]]))
    assert not hooks_of(gpt2)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.slow
def test_a_changed_layer_costs_the_same_whether_the_blocks_below_it_run_or_are_replayed(variant, tokenizer):
    model = load_model(tiny_model(variant), tokenizer=tokenizer)
    examples = Examples([Example(np.array([4, 5, 6, 7]), "", None), Example(np.array([8, 9, 4]), "", None)], "by hand", 2)
    (feed, *_) = _feeds(examples, model, True)
    with recorded(model) as outputs:
        untouched = batch_losses(model, feed).tolist()
    for layer in range(1, model.layers + 1):
        with substituted(model, [layer], softmax):
            whole = batch_losses(model, feed).tolist()
            with replayed(model, outputs[: layer - 1]):
                assert batch_losses(model, feed).tolist() == whole
    assert batch_losses(model, feed).tolist() == untouched
    assert not any("forward" in block.__dict__ for block in model.blocks)


def test_blocks_that_have_a_forward_of_their_own_get_it_back_after_an_error(tokenizer):
    model = load_model(tiny_model("gpt2"), tokenizer=tokenizer)
    own = model.blocks[0].forward
    model.blocks[0].forward = own
    with pytest.raises(ZeroDivisionError), replayed(model, [None, None]):
        raise ZeroDivisionError
    assert model.blocks[0].__dict__["forward"] is own
    assert "forward" not in model.blocks[1].__dict__
