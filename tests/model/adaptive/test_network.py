"""The network against a slow reference written from the formulas, and as a Hugging Face model among others."""

from math import cos, exp, log, sin, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ffmem import build_index, load_model
from ffmem.model.adaptive.bands import IGNORED, tails_of
from ffmem.model.adaptive.config import AdaptiveConfig
from ffmem.model.adaptive.network import AdaptiveLM, AdaptiveTrunk, register, sinusoids
from ffmem.model.adaptive.vocabulary import AdaptiveVocabulary
from ffmem.model.check import check
from tests.tiny import VOCABULARY, some_sentences, tiny_model

CUTOFFS = [20, 60]
EVERY_BAND = torch.tensor([[0, 19, 20, 59, 60, 100, 7, 33, 88, 1, 4, 61], [5, 5, 99, 45, 21, 0, 3, 70, 18, 20, 60, 42]])
"""Two texts with words of all bands and of every edge between them, and without the padding id, 2."""


@pytest.fixture(scope="module")
def model():
    """Shared: change nothing."""
    return tiny_model("adaptive_lm")


def close(found, expected, **tolerance):
    torch.testing.assert_close(found, expected, **({"rtol": 1e-4, "atol": 1e-5} | tolerance))


# ---- the reference: a text of ids, word by word, in float64


def band_of(id):
    """Number and first word of the band that holds a word."""
    number = sum(id >= cutoff for cutoff in CUTOFFS)
    return number, [0, *CUTOFFS][number]


def reference_stream(weights, ids, d=32, heads=4, layers=3):
    """The stream in front of the first block and behind every block: a list of (pos, d)."""
    half = d // 2
    stream = []
    for position, id in enumerate(ids):
        band, low = band_of(id)
        word = weights[f"model.embed.bands.{band}.words.weight"][id - low]
        vector = sqrt(d) * weights[f"model.embed.bands.{band}.project.weight"] @ word
        angles = [(position + 2) * 10000 ** (-i / (half - 1)) for i in range(half)]
        stream.append(vector + torch.tensor([sin(a) for a in angles] + [cos(a) for a in angles], dtype=torch.float64))
    h = torch.stack(stream)
    behind = [h]
    for layer in range(layers):
        part = {name.removeprefix(f"model.layers.{layer}."): w for name, w in weights.items() if f"layers.{layer}." in name}

        def linear(name, x, part=part):
            return part[f"{name}.weight"] @ x + part[f"{name}.bias"]

        def norm(name, x, part=part):
            spread = ((x - x.mean()) ** 2).mean()
            return (x - x.mean()) / torch.sqrt(spread + 1e-5) * part[f"{name}.weight"] + part[f"{name}.bias"]

        x = [norm("self_attn_layer_norm", row) for row in h]
        q, k, v = ([linear(f"self_attn.{letter}_proj", row) for row in x] for letter in "qkv")
        rows = []
        for position in range(len(ids)):
            mixed = []
            for head in range(heads):
                own = slice(head * d // heads, (head + 1) * d // heads)
                scores = [float(q[position][own] @ k[past][own]) / sqrt(d / heads) for past in range(position + 1)]
                total = sum(exp(score) for score in scores)
                mixed.append(sum(exp(score) / total * v[past][own] for past, score in enumerate(scores)))
            r = h[position] + linear("self_attn.out_proj", torch.cat(mixed))
            m = linear("fc1", norm("final_layer_norm", r)).clamp_min(0)
            rows.append(r + linear("fc2", m))
        h = torch.stack(rows)
        behind.append(h)
    return behind


def reference_log_probs(weights, h, size=VOCABULARY):
    """log p of every word for one vector of the stream: log p(band) + log p(word | band)."""
    words = [weights[f"model.embed.bands.{band}.words.weight"] for band in range(len(CUTOFFS) + 1)]
    projects = [weights[f"model.embed.bands.{band}.project.weight"] for band in range(len(CUTOFFS) + 1)]
    head = [float(row @ h) for row in words[0]] + [float(row @ h) for row in weights["softmax.bands.weight"]]
    head_total = log(sum(exp(score) for score in head))
    found = []
    for id in range(size):
        band, low = band_of(id)
        if band == 0:
            found.append(head[id] - head_total)
        else:
            scores = words[band] @ (projects[band].T @ h)
            inside = float(scores[id - low]) - log(sum(exp(float(score)) for score in scores))
            found.append(head[len(words[0]) + band - 1] - head_total + inside)
    return torch.tensor(found)


@torch.inference_mode()
def test_the_forward_is_that_of_the_formulas(model):
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    outputs = model(EVERY_BAND, output_hidden_states=True)
    assert outputs.logits.shape == (2, 12, VOCABULARY)
    for text, ids in enumerate(EVERY_BAND.tolist()):
        stream = reference_stream(weights, ids)
        assert len(outputs.hidden_states) == len(stream) == 4
        for found, expected in zip(outputs.hidden_states, stream, strict=True):
            close(found[text].double(), expected)
        for position in range(12):
            close(outputs.logits[text, position], reference_log_probs(weights, stream[-1][position]))


def test_sinusoids_start_at_position_two_and_have_no_end():
    found = sinusoids(torch.tensor([0, 1, 5000]), 4)  # rates 1 and 1/10000
    expected = [[sin(p), sin(p / 10000), cos(p), cos(p / 10000)] for p in (2, 3, 5002)]
    close(found, torch.tensor(expected), atol=1e-4)


def test_a_text_longer_than_the_context_is_no_error(model):
    with torch.inference_mode():
        assert model(torch.arange(80)[None]).logits.isfinite().all()
    assert model.config.max_position_embeddings == 64


# ---- the softmax


@given(st.integers(0, 1000), st.floats(0.01, 300))
@settings(max_examples=20, deadline=None)
def test_probabilities_sum_to_one_for_every_vector(model, seed, size):
    h = size * torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        log_probs = model.log_probs(h)
    assert log_probs.dtype == torch.float32
    assert (log_probs <= 1e-4).all()
    close(log_probs.double().exp().sum(-1), torch.ones(3, 2, dtype=torch.float64))


@given(st.lists(st.sampled_from([IGNORED, 0, 19, 20, 41, 59, 60, 77, 100]), min_size=1, max_size=12), st.booleans())
@settings(max_examples=40, deadline=None)
def test_nll_is_the_sum_of_the_targets_log_probs(model, targets, tails_are_given):
    h = 3 * torch.randn(len(targets), 32, generator=torch.Generator().manual_seed(len(targets)))
    with torch.inference_mode():
        expected = -sum(model.log_probs(row)[target] for row, target in zip(h, targets, strict=True) if target != IGNORED)
        tails = tails_of(torch.tensor(targets), model.config.bands[1:]) if tails_are_given else None
        close(model.nll(h, torch.tensor(targets), tails), torch.as_tensor(expected, dtype=torch.float32))


def test_the_tails_of_targets_are_their_rows_and_their_places_in_a_band():
    targets = torch.tensor([0, 20, IGNORED, 60, 19, 59, 100])
    first, second = tails_of(targets, AdaptiveConfig(vocab_size=101, cutoffs=CUTOFFS).bands[1:])
    assert [part.tolist() for part in first] == [[1, 5], [0, 39]]
    assert [part.tolist() for part in second] == [[3, 6], [0, 40]]


def test_only_rows_whose_target_is_in_a_tail_go_through_that_tail(model, monkeypatch):
    seen = []
    plain = model.softmax.tail
    monkeypatch.setattr(
        type(model.softmax), "tail", staticmethod(lambda h, band: seen.append((len(h), band.low)) or plain(h, band))
    )
    model.nll(torch.ones(6, 32), torch.tensor([3, 20, 25, IGNORED, 19, 100]))
    assert seen == [(2, 20), (1, 60)]
    seen.clear()
    model.nll(torch.ones(2, 32), torch.tensor([3, IGNORED]))
    assert seen == []


def test_targets_of_thirty_two_bits_will_do(model):
    h, targets = torch.ones(4, 32), torch.tensor([3, 20, 60, IGNORED])
    assert torch.equal(model.nll(h, targets.int()), model.nll(h, targets))


@pytest.mark.parametrize("target", [VOCABULARY, -1])
def test_a_target_that_is_no_word_is_an_error(model, target):
    with pytest.raises(IndexError):
        model.nll(torch.ones(1, 32), torch.tensor([target]))


@pytest.mark.parametrize("id", [VOCABULARY, 10_000, -1])
def test_an_id_that_is_no_word_is_an_error(model, id):
    with pytest.raises(IndexError):
        model(torch.tensor([[3, id]]))


# ---- gradients and the loss


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("tails_are_given", [False, True])
def test_gradients_reach_every_weight_and_are_those_of_the_plain_log_probs(tails_are_given):
    model = tiny_model("adaptive_lm").train()
    targets = EVERY_BAND.roll(-1, 1).clone()
    targets[0, 3] = targets[1, -1] = IGNORED
    counted = targets != IGNORED
    log_probs = model(EVERY_BAND).logits[counted].gather(1, targets[counted][:, None])
    expected = gradients(model, -log_probs.sum())
    tails = tails_of(targets.flatten(), model.config.bands[1:]) if tails_are_given else None
    h = model.model(EVERY_BAND).last_hidden_state
    found = gradients(model, model.nll(h.flatten(0, 1), targets.flatten(), tails))
    for name, gradient in found.items():
        close(gradient, expected[name], atol=1e-4)
        # A number added to all keys changes no attention.
        assert gradient.any() or name.endswith("k_proj.bias"), name
    for band in range(3):  # every word is in the softmax, so every word has a gradient
        assert found[f"model.embed.bands.{band}.words.weight"].any(1).all()


def test_a_words_gradient_comes_from_where_it_stands_and_from_nowhere_else(model):
    """The input masks words of other bands, whose ids fall on rows of a band as well."""
    model.zero_grad()
    model.model.embed(torch.tensor([[3, 25, 25, 61]])).sum().backward()
    touched = {band.low: band.words.weight.grad.any(1).nonzero().flatten().tolist() for band in model.model.embed}
    model.zero_grad()
    assert touched == {0: [3], 20: [5], 60: [1]}


def test_labels_give_the_mean_loss_of_the_next_words(model):
    labels = EVERY_BAND.clone()
    labels[0, 4] = labels[1, 0] = labels[1, 11] = IGNORED  # the first is a target of nothing anyway
    with torch.inference_mode():
        outputs = model(EVERY_BAND, labels=labels)
        targets = labels[:, 1:]
        own = outputs.logits[:, :-1].gather(2, targets.clamp_min(0)[..., None])[..., 0]
    close(outputs.loss, -own[targets != IGNORED].sum() / 20)
    assert outputs.logits.shape == (2, 12, VOCABULARY)


# ---- caches, masks and generation


@given(st.lists(st.integers(1, 5), min_size=1, max_size=11))
@settings(max_examples=20, deadline=None)
def test_any_cut_into_steps_with_a_cache_equals_the_whole(model, lengths):
    with torch.inference_mode():
        expected = model(EVERY_BAND).logits
        past, begin, found = None, 0, []
        for length in [*lengths, 12]:
            if begin < 12:
                outputs = model(EVERY_BAND[:, begin : begin + length], past_key_values=past, use_cache=True)
                past, begin = outputs.past_key_values, begin + length
                found.append(outputs.logits)
    close(torch.cat(found, 1), expected)


def test_no_cache_is_made_where_none_is_wanted(model):
    with torch.inference_mode():
        without, with_one = model(EVERY_BAND, use_cache=False), model(EVERY_BAND)
    assert without.past_key_values is None
    assert with_one.past_key_values.get_seq_length() == 12
    assert torch.equal(without.logits, with_one.logits)


def test_a_past_that_is_given_counts_even_where_no_new_one_is_wanted(model):
    with torch.inference_mode():
        past = model(EVERY_BAND[:, :8]).past_key_values
        found = model(EVERY_BAND[:, 8:], past_key_values=past, use_cache=False).logits
        close(found, model(EVERY_BAND).logits[:, 8:])


@torch.inference_mode()
def test_padding_on_either_side_changes_nothing_under_a_mask(model):
    ids = EVERY_BAND[:1, :7]
    pad = torch.full((1, 5), 2)
    alone = model(ids).logits
    mask = torch.tensor([[0] * 5 + [1] * 7])
    left = model(torch.cat([pad, ids], 1), attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0))
    assert left.logits.isfinite().all()
    close(left.logits[:, 5:], alone)
    right = model(torch.cat([ids, pad], 1), attention_mask=mask.flip(1))
    close(right.logits[:, :7], alone)
    close(model(ids, attention_mask=torch.ones(1, 7, dtype=torch.long)).logits, alone)


def by_argmax(model, ids, count):
    """Greedy generation written out: the whole text again for every word."""
    for _ in range(count):
        with torch.inference_mode():
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids


def generated(model, ids, **options):
    # No word ends a text here, so that all of them have the same length.
    return model.generate(ids, **({"max_new_tokens": 8, "do_sample": False, "eos_token_id": None} | options))


@pytest.fixture(scope="module")
def talker():
    """A model that does not say the same word forever. Shared: change nothing."""
    model = tiny_model("adaptive_lm", seed=6)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "layers" in name:
                parameter.mul_(5)
    return model


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"cache_implementation": "static"}], ids=str)
def test_greedy_generation_is_the_most_likely_word_again_and_again(talker, options):
    found = generated(talker, EVERY_BAND, **options)
    assert torch.equal(found, by_argmax(talker, EVERY_BAND, 8))
    assert len(found[:, 12:].unique()) > 8  # the test would see a word that is off


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_batch_padded_on_the_left_is_continued_as_each_text_alone(talker, use_cache):
    texts = [EVERY_BAND[0, :3], EVERY_BAND[1, :9], EVERY_BAND[0, 4:5]]
    ids, mask = torch.full((3, 9), 2), torch.zeros(3, 9, dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, -len(text) :], mask[row, -len(text) :] = text, 1
    found = generated(talker, ids, attention_mask=mask, use_cache=use_cache)
    for row, text in enumerate(texts):
        assert found[row, 9:].tolist() == by_argmax(talker, text[None], 8)[0, len(text) :].tolist()


def test_generation_goes_on_from_vectors_as_from_their_ids(talker):
    vectors = talker.get_input_embeddings()(EVERY_BAND)
    assert torch.equal(generated(talker, None, inputs_embeds=vectors), by_argmax(talker, EVERY_BAND, 8)[:, 12:])


def test_sampling_is_the_same_with_and_without_a_cache_and_follows_the_probabilities(model):
    def sample(**options):
        torch.manual_seed(5)
        return generated(model, EVERY_BAND[:1], do_sample=True, **options)

    assert torch.equal(sample(), sample(use_cache=False))
    assert torch.equal(sample(top_k=1), by_argmax(model, EVERY_BAND[:1], 8))
    # Logits are log-probabilities: a softmax of them is the model's own distribution.
    many = sample(max_new_tokens=1, num_return_sequences=4000, top_k=0)[:, -1]
    with torch.inference_mode():
        expected = model(EVERY_BAND[:1]).logits[0, -1].exp()
    close(torch.bincount(many, minlength=VOCABULARY) / 4000, expected, rtol=0, atol=0.03)


def test_a_beam_of_every_word_finds_the_most_likely_pair(talker):
    ids = EVERY_BAND[:1, :4]
    with torch.inference_mode():
        first = talker(ids).logits[0, -1]
        pairs = torch.cat([ids.expand(VOCABULARY, -1), torch.arange(VOCABULARY)[:, None]], 1)
        total = first[:, None] + talker(pairs).logits[:, -1]
    best = divmod(int(total.argmax()), VOCABULARY)
    assert generated(talker, ids, num_beams=VOCABULARY, max_new_tokens=2)[0, 4:].tolist() == list(best)


# ---- options of a forward


@torch.inference_mode()
def test_hidden_states_are_the_stream_around_every_block(model):
    caught = []
    handles = [
        block.register_forward_hook(lambda _, args, out: caught.append((args[0], out))) for block in model.model.layers
    ]
    states = model(EVERY_BAND, output_hidden_states=True).hidden_states
    for handle in handles:
        handle.remove()
    assert len(states) == 4
    for (before, behind), state, following in zip(caught, states, states[1:], strict=False):
        assert torch.equal(before, state)
        assert torch.equal(behind, following)
    assert torch.equal(states[-1], model.model(EVERY_BAND).last_hidden_state)
    assert torch.equal(model.log_probs(states[-1]), model(EVERY_BAND).logits)
    assert model(EVERY_BAND).hidden_states is None


@pytest.mark.parametrize(("kept", "places"), [(0, range(12)), (1, [11]), (3, [9, 10, 11]), (torch.tensor([2, 7]), [2, 7])])
@torch.inference_mode()
def test_logits_are_kept_for_the_places_asked_for(model, kept, places):
    found = model(EVERY_BAND, logits_to_keep=kept).logits
    close(found, model(EVERY_BAND).logits[:, list(places)])


@torch.inference_mode()
def test_vectors_may_take_the_place_of_ids(model):
    vectors = model.get_input_embeddings()(EVERY_BAND)
    assert torch.equal(model(inputs_embeds=vectors).logits, model(EVERY_BAND).logits)
    for wrong in ({}, {"input_ids": EVERY_BAND, "inputs_embeds": vectors}):
        with pytest.raises(ValueError, match="expected input_ids or inputs_embeds, found both or neither"):
            model(**wrong)


@torch.inference_mode()
def test_half_precision_is_near_and_its_log_probs_are_float32(model):
    half = tiny_model("adaptive_lm", dtype=torch.bfloat16)
    outputs = half(EVERY_BAND, output_hidden_states=True)
    assert {state.dtype for state in outputs.hidden_states} == {torch.bfloat16}
    assert outputs.logits.dtype == torch.float32
    expected = model(EVERY_BAND).logits
    assert (outputs.logits - expected).abs().mean() < 0.02 * expected.abs().mean()
    close(outputs.logits.exp().sum(-1), torch.ones(2, 12))
    for text in range(2):  # the loss is computed in float32 as well
        own = outputs.logits[text].gather(1, EVERY_BAND[text, :, None])
        close(half.nll(outputs.hidden_states[-1][text], EVERY_BAND[text]), -own.sum())


# ---- among the models of Hugging Face


def test_the_papers_model_has_its_weights_and_no_buffers():
    with torch.device("meta"):
        model = AdaptiveLM(AdaptiveConfig())
    words = 20000 * 1024 + 40000 * 256 + 207744 * 64
    projections, bands = (1024 + 256 + 64) * 1024, 2 * 1024
    block = 4 * (1024 * 1024 + 1024) + 2 * (2 * 1024) + (4096 * 1024 + 4096) + (1024 * 4096 + 1024)
    assert model.num_parameters() == words + projections + bands + 16 * block == 246_933_504
    assert list(model.buffers()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("load", [AdaptiveLM.from_pretrained, AutoModelForCausalLM.from_pretrained], ids=["own", "auto"])
def test_a_saved_model_comes_back_bit_by_bit(tmp_path, dtype, load):
    register()
    model = tiny_model("adaptive_lm", dtype=dtype)
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == dict(model.named_parameters()).keys()
    loaded, report = load(tmp_path, dtype="auto", output_loading_info=True)
    assert type(loaded) is AdaptiveLM
    assert not loaded.training
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())
    with torch.inference_mode():
        assert torch.equal(loaded(EVERY_BAND).logits, model(EVERY_BAND).logits)


def test_the_auto_classes_know_it_after_register_however_often_it_is_called(tmp_path, model):
    register()
    register.__wrapped__()
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is AdaptiveConfig
    trunk = AutoModel.from_pretrained(tmp_path)
    assert type(trunk) is AdaptiveTrunk
    with torch.inference_mode():
        assert torch.equal(trunk(EVERY_BAND).last_hidden_state, model.model(EVERY_BAND).last_hidden_state)


def test_new_weights_enter_the_stream_with_about_unit_variance_and_say_little_yet():
    torch.manual_seed(0)
    config = AdaptiveConfig(vocab_size=3000, hidden_size=256, num_hidden_layers=1, cutoffs=[500, 1500], intermediate_size=64)
    model = AdaptiveLM(config).eval()
    with torch.inference_mode():
        for band in config.bands:
            assert 0.5 < model.model.embed(torch.arange(band.low, band.high)[None]).var() < 2
    block = model.model.layers[0]
    assert not any(part.bias.any() for part in (block.fc1, block.fc2, block.self_attn.q_proj, block.self_attn_layer_norm))
    assert (block.final_layer_norm.weight == 1).all()


# ---- as memories


def test_a_saved_folder_is_loaded_and_its_memories_are_read(model, save):
    folder = save(model)
    loaded = load_model(folder, device="cpu")
    assert (loaded.name, loaded.family.name, loaded.found_by_shape) == (str(folder), "adaptive_lm", False)
    assert (loaded.layers, loaded.cells, loaded.d, loaded.context) == (3, [64, 64, 64], 32, 64)
    assert isinstance(loaded.vocabulary, AdaptiveVocabulary)
    assert check(loaded).failures() == []
    for layer, block in enumerate(model.model.layers, 1):
        assert torch.equal(loaded.keys(layer), block.fc1.weight)
        assert torch.equal(loaded.values(layer), block.fc2.weight.T)
        assert torch.equal(loaded.value_bias(layer), block.fc2.bias)


@torch.inference_mode()
def test_a_recording_holds_the_coefficients_and_the_sums_of_the_formulas(memories):
    memory = memories("adaptive_lm")
    found = memory.record(EVERY_BAND)
    states = memory.model(EVERY_BAND, output_hidden_states=True).hidden_states
    for layer, block in enumerate(memory.blocks):
        r, y, o, m = found.r[layer], found.y[layer], found.o[layer], found.m[layer]
        assert torch.equal(r + y, o)
        assert torch.equal(o, states[layer + 1])
        close(r, states[layer] + block.self_attn(block.self_attn_layer_norm(states[layer]), None, None))
        close(m, (block.final_layer_norm(r) @ memory.keys(layer + 1).T + block.fc1.bias).clamp_min(0))
        close(y, m @ memory.values(layer + 1) + memory.value_bias(layer + 1))
        assert 0.1 < (m > 0).float().mean() < 0.9
    assert torch.equal(found.logits, memory.model(EVERY_BAND).logits)


def test_an_index_of_a_saved_folder_holds_the_largest_coefficient_of_every_cell(model, save, tokenizer, tmp_path):
    sentences = some_sentences(8, seed=4, longest=6)
    index = build_index(str(save(model)), sentences, out=tmp_path / "run", top=2, unit="line", bos="off", quiet=True)
    loaded = load_model(model, tokenizer=tokenizer)
    recorded = [loaded.record(torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])) for text in sentences]
    for layer, cell in ((1, 0), (2, 31), (3, 63)):
        best = max(float(recording.m[layer - 1][..., cell].max()) for recording in recorded)
        triggers = index[f"L{layer}D{cell}"].triggers
        assert (triggers[0].coefficient if triggers else 0.0) == pytest.approx(best, rel=1e-3, abs=1e-5)
