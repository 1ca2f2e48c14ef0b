"""The whole pass: against the definition, prefix by prefix, for every family; and a model whose answer is known."""

import json
from dataclasses import replace

import pytest
import torch

from ffmem import build_index, load_model, open_index
from ffmem.corpus import record
from ffmem.corpus.corpus import Corpus
from ffmem.errors import CorpusError, FfmemError, ModelError, RunError
from ffmem.indexing import checkpoint
from ffmem.indexing.provenance import sample_of
from ffmem.run.folder import RunFolder
from tests.indexing.reference import best_offers, coefficients_alone, content, offers_of
from tests.tiny import VARIANTS, WORDS, silent_gpt2, some_sentences, tiny_model, word_tokenizer

T = 4
CLOSE = 2e-5


def files_of(folder):
    """The text of every file below a folder, as far as it is text."""
    return {
        path.relative_to(folder).as_posix(): path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()
    }


def ids_of(tokenizer, sentences):
    return [tokenizer(sentence, add_special_tokens=False)["input_ids"] for sentence in sentences]


def assert_same_triggers(view_triggers, offers, t, distinct, sign):
    """Equal by rank within rounding; where two offers are nearly tied, either may come first."""
    wanted = best_offers(offers, t, distinct)
    by_place = {(offer.sentence, offer.position): offer for offer in offers}
    assert len(view_triggers) == len(wanted)
    for trigger, offer in zip(view_triggers, wanted, strict=True):
        assert sign * trigger.coefficient == pytest.approx(offer.coefficient, rel=1e-3, abs=CLOSE)
        own = by_place[trigger.sentence, trigger.position]
        assert own.coefficient == pytest.approx(offer.coefficient, rel=1e-3, abs=CLOSE)
        if abs(own.coefficient - offer.coefficient) > CLOSE:
            assert own.prefix == offer.prefix


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.slow
def test_every_family_gives_the_triggers_of_each_prefix_run_alone(variant, tokenizer, tmp_path):
    model = load_model(tiny_model(variant), tokenizer=tokenizer)
    sentences = some_sentences(12, seed=1, longest=8)
    index = build_index(model, sentences, out=tmp_path / "run", top=T, unit="line", batch_tokens=40, quiet=True)
    ids = ids_of(tokenizer, sentences)
    alone = coefficients_alone(model, ids, bos=True)
    for layer in range(1, model.layers + 1):
        for cell in range(0, model.cells[layer - 1], 13):
            view = index[f"L{layer}D{cell}"]
            assert_same_triggers(view.triggers, offers_of(alone, ids, layer, cell, 1), T, "text", 1)
            if model.family.gated:
                assert_same_triggers(view.negative_triggers, offers_of(alone, ids, layer, cell, -1), T, "text", -1)
            else:
                assert not view.negative_triggers


@pytest.mark.parametrize("distinct", ["text", "sentence", "document", "none"])
@pytest.mark.parametrize("bos", ["on", "off"])
@pytest.mark.slow
def test_modes_and_bos_as_the_spec_defines_them(distinct, bos, gpt2, tmp_path):
    sentences = some_sentences(30, seed=2, longest=6)
    sentences += sentences[:5]  # repeated sentences count once, unless every prefix or document counts
    records = ["\n".join(sentences[at : at + 3]) for at in range(0, 35, 3)]
    index = build_index(
        gpt2, records, out=tmp_path / "run", top=7, unit="line", distinct=distinct, bos=bos, shard_tokens=50, quiet=True
    )
    ids = ids_of(gpt2.tokenizer, sentences)
    alone = coefficients_alone(gpt2, ids, bos=bos == "on")
    for layer, cell in ((1, 0), (1, 77), (2, 5), (3, 127)):
        view = index[f"L{layer}D{cell}"]
        offers = [replace(offer, document=offer.sentence // 3) for offer in offers_of(alone, ids, layer, cell, 1)]
        assert_same_triggers(view.triggers, offers, 7, distinct, 1)
        if distinct == "document":
            assert len({trigger.sentence // 3 for trigger in view.triggers}) == 7
    assert index.counts.sentences == 35


@pytest.fixture
def planted(tokenizer):
    """One layer that sees only the last word: cell 0 knows `king` (1) and `queen` (0.5), cell 1 `war`, the rest nothing.

    Attention and positions are silent, so x is a LayerNorm of a one-hot vector: large at the word, below zero elsewhere.
    """
    size = len(tokenizer)
    model = silent_gpt2(size)
    word = {name: tokenizer.convert_tokens_to_ids(name) for name in WORDS}
    with torch.no_grad():
        model.transformer.wte.weight.copy_(torch.eye(size))
        block = model.transformer.h[0]
        for norm in (block.ln_1, block.ln_2, model.transformer.ln_f):
            norm.weight.fill_(1)
        block.mlp.c_fc.weight[word["king"], 0] = 1.0
        block.mlp.c_fc.weight[word["queen"], 0] = 0.5
        block.mlp.c_fc.weight[word["war"], 1] = 2.0
        block.mlp.c_proj.weight[0, word["capital"]] = 5.0
        block.mlp.c_proj.weight[1, word["army"]] = 5.0
    return load_model(model, tokenizer=tokenizer)


def test_planted_keys_fire_where_a_person_would_say(planted, tmp_path):
    sentences = [
        "the queen left .",  # 0: queen at 2
        "the king found the war .",  # 1: king at 2, war at 5
        "old king and new king .",  # 2: king at 2, again at 5: only the first counts
        "the king wrote .",  # 3: offers "the king" again, as sentence 1 did
        "a song .",  # 4: nothing
        "the queen and the king",  # 5: queen at 2, king at 5: the king is stronger
    ]
    index = build_index(planted, sentences, out=tmp_path / "run", top=10, unit="line", quiet=True)
    found = [(t.sentence, t.position, t.prefix, t.next) for t in index["L1D0"].triggers]
    assert found == [
        (1, 2, "the king", " found"),
        (2, 2, "old king", " and"),
        (5, 5, "the queen and the king", None),
        (0, 2, "the queen", " left"),
    ]
    king, queen = index["L1D0"].triggers[0].coefficient, index["L1D0"].triggers[3].coefficient
    assert queen == pytest.approx(king / 2, rel=0.05)
    assert [(t.sentence, t.position) for t in index["L1D1"].triggers] == [(1, 5)]
    assert len(index["L1D2"].triggers) == 0
    assert index["L1D0"].value.top(1)[0].token == "capital"
    assert index["L1D1"].value.top(1)[0].token == "army"
    tokens = index.counts.tokens
    assert index["L1D0"].stats.active == pytest.approx(7 / tokens)
    assert index["L1D2"].stats.maximum == 0.0


def test_statistics_of_a_run_are_those_of_each_prefix_alone(gpt2, tmp_path):
    sentences = some_sentences(25, seed=3)
    index = build_index(gpt2, sentences, out=tmp_path / "run", unit="line", quiet=True)
    assert index.manifest.settings.stats == "full"
    ids = ids_of(gpt2.tokenizer, sentences)
    alone = coefficients_alone(gpt2, ids, bos=True)
    for layer, cell in ((1, 3), (3, 100)):
        x = torch.tensor([m[cell] for (at, _, _), m in alone.items() if at == layer], dtype=torch.float64)
        stats = index[f"L{layer}D{cell}"].stats
        assert stats.active == pytest.approx(float((x > 0).double().mean()))
        assert stats.maximum == pytest.approx(float(x.max()), abs=CLOSE)
        assert stats.minimum == pytest.approx(float(x.min()), abs=CLOSE)
        assert stats.mean == pytest.approx(float(x.mean()), abs=CLOSE)
        assert stats.variance == pytest.approx(float(x.var(unbiased=False)), rel=1e-3)
        assert stats.quantile(0.9) == pytest.approx(float(x.quantile(0.9, interpolation="lower")), rel=0.05)


def test_sampled_statistics_measure_every_sixteenth_token_but_keep_counts_exact(gpt2, tmp_path):
    sentences = some_sentences(40, seed=4)
    full = build_index(gpt2, sentences, out=tmp_path / "full", unit="line", stats="full", quiet=True)
    sample = build_index(gpt2, sentences, out=tmp_path / "sample", unit="line", stats="sample", quiet=True)
    lengths = [len(ids) for ids in ids_of(gpt2.tokenizer, sentences)]
    wanted = sum((row + at) % 16 == 0 for row, length in enumerate(lengths) for at in range(1, length + 1))
    assert sample.counts.measured_tokens == wanted
    a, b = full["L2D9"].stats, sample["L2D9"].stats
    assert (a.active, a.maximum, a.minimum) == (b.active, b.maximum, b.minimum)
    assert "divisible by 16" in sample.manifest.settings.measured


def test_sentences_longer_than_the_context_are_cut_and_counted(gpt2, tmp_path):
    long = " ".join(["the king wrote a song and left"] * 20)
    index = build_index(gpt2, [long, "the end ."], out=tmp_path / "run", unit="line", quiet=True)
    assert index.counts.cut_to_context == 1
    assert index.counts.sentences == 4  # 140 tokens in windows of 63, 63 and 14, and the short one
    assert index.counts.tokens == 143


def test_windows_cut_a_record_every_n_tokens(gpt2, tmp_path):
    index = build_index(gpt2, ["the king wrote a song", "the end"], out=tmp_path / "run", unit="window:2", quiet=True)
    assert (index.counts.sentences, index.counts.cut_to_context) == (4, 0)
    assert {t.prefix for t in index["L1D0"].triggers} <= {"the", "the king", " wrote", " wrote a", " song", "the end"}


def test_layers_and_limits_are_kept(gpt2, tmp_path):
    sentences = some_sentences(30, seed=5)
    index = build_index(gpt2, sentences, out=tmp_path / "run", unit="line", layers="1,3", limit_tokens=50, quiet=True)
    assert index.layers == [1, 3]
    assert index.counts.tokens <= 50
    with pytest.raises(FfmemError, match="layers 1, 3, found layer 2"):
        index["L2D0"]
    whole = build_index(gpt2, sentences, out=tmp_path / "whole", unit="line", limit_tokens=50, quiet=True)
    assert index["L3D7"].triggers == whole["L3D7"].triggers


@pytest.mark.slow
def test_the_plan_of_batches_changes_coefficients_only_by_rounding(gpt2, tmp_path):
    sentences = some_sentences(80, seed=6)
    small = build_index(gpt2, sentences, out=tmp_path / "a", unit="line", batch_tokens=64, shard_tokens=100, quiet=True)
    large = build_index(gpt2, sentences, out=tmp_path / "b", unit="line", quiet=True)
    assert small.counts.shards > 3
    for name in ("L1D1", "L2D50", "L3D127"):
        pairs = zip(small[name].triggers, large[name].triggers, strict=True)
        assert all(a.coefficient == pytest.approx(b.coefficient, abs=CLOSE) for a, b in pairs)


def test_bfloat16_runs_and_its_ties_go_to_the_earlier_sentence(tokenizer, tmp_path):
    model = load_model(tiny_model("llama", dtype=torch.bfloat16), tokenizer=tokenizer)
    index = build_index(model, some_sentences(60, seed=7), out=tmp_path / "run", unit="line", top=20, quiet=True)
    tied = 0
    for view in index:
        for first, second in zip(view.triggers, view.triggers[1:], strict=False):
            assert first.coefficient >= second.coefficient
            if first.coefficient == second.coefficient:
                tied += 1
                assert (first.sentence, first.position) < (second.sentence, second.position)
    assert tied > 10


def test_coefficients_that_are_not_finite_are_refused_with_the_layer(tokenizer, tmp_path):
    model = tiny_model("gpt2")
    loaded = load_model(model, tokenizer=tokenizer)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight.fill_(float("inf"))
    with pytest.raises(ModelError, match=r"layer 2 gives coefficients that are not finite"):
        build_index(loaded, ["the king ."], out=tmp_path / "run", quiet=True)


def test_what_is_not_finite_is_told_by_its_part_and_its_number_there(tokenizer, tmp_path):
    model = tiny_model("gpt2")
    loaded = load_model(model, tokenizer=tokenizer)
    with torch.no_grad():
        model.transformer.wte.weight[tokenizer.convert_tokens_to_ids("war")] = torch.inf
    sentences = ["the king ."] * 18 + ["the war ."]
    with pytest.raises(ModelError, match=r"\(in sentence 0 of part 2 of the corpus or one of those read with it\)"):
        build_index(loaded, sentences, out=tmp_path / "run", shard_tokens=20, quiet=True)


def test_building_leaves_the_model_untouched(gpt2, tmp_path):
    before = gpt2.logits(torch.tensor([[1, 2, 3]])).clone()
    build_index(gpt2, ["the king ."], out=tmp_path / "run", quiet=True)
    assert torch.equal(gpt2.logits(torch.tensor([[1, 2, 3]])), before)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in gpt2.model.modules())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top": 0}, "top as a whole number from 1 to 10,000, found 0"),
        ({"unit": "page"}, "unit sentence, line or window:N"),
        ({"distinct": "word"}, "distinct text, sentence, document or none"),
        ({"layers": "9"}, "layers from 1 to 3, found layer 9"),
        ({"stats": "some"}, "stats auto, full, sample or off"),
        ({"negative": "yes"}, "negative auto, on or off"),
        ({"bos": "yes"}, "bos auto, on or off"),
        ({"batch_tokens": 0}, "batch-tokens auto or a number"),
        ({"unit": "window:64"}, "windows of at most 63 tokens, the model's context, found window:64"),
        ({"dtype": "bfloat16"}, "is loaded as torch.float32, found dtype 'bfloat16'"),
        ({"limit_tokens": 0}, "limit-tokens as a whole number from 1"),
        ({"sample": 0}, "sample as a whole number from 1"),
        ({"sample": 1, "seed": -1}, "seed as a whole number from 0 to"),
        ({"wikitext": "drop"}, "wikitext auto, keep or plain, found 'drop'"),
        ({"max_record": "ten"}, "max-record from 100 bytes to 1 TB, such as 16MB, found 'ten'"),
        ({"limit_tokens": 1}, "more than the 1 tokens of --limit-tokens"),
    ],
)
def test_bad_settings_are_named(gpt2, tmp_path, change, message):
    with pytest.raises(FfmemError, match=message):
        build_index(gpt2, ["the king ."], out=tmp_path / "run", quiet=True, **change)


def test_a_corpus_without_text_is_an_error_that_says_what_was_left_out(gpt2, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text(" = Only a heading = \n\n")
    with pytest.raises(
        CorpusError, match=r"expected text in .*empty.txt, found none \(left out: 1 blank lines, 1 headings\)"
    ):
        build_index(gpt2, empty, out=tmp_path / "run", quiet=True)


def test_a_run_is_not_mixed_with_another_model_corpus_or_setting(gpt2, llama, tmp_path):
    out = tmp_path / "run"
    build_index(gpt2, ["the king ."], out=out, quiet=True)
    with pytest.raises(RunError, match="was made with model"):
        build_index(llama, ["the king ."], out=out, quiet=True)
    with pytest.raises(RunError, match="was made with top 50, now it is 3"):
        build_index(gpt2, ["the king ."], out=out, top=3, quiet=True)
    with pytest.raises(RunError, match="the corpus has changed"):
        build_index(gpt2, ["the queen ."], out=out, quiet=True)
    again = build_index(llama, ["the queen ."], out=out, overwrite=True, quiet=True)
    assert again.manifest.model.family == "llama"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "files",
    [
        {"notes.txt": "mine"},
        {"results/thesis.csv": "x"},
        {"results/activity.json": "{}"},
        {"figures/fig3.png": "x"},
        {"work/shard-000000.arrow": "x"},
        {"log.jsonl": "x"},
        {"report.html": "x"},
        {"triggers.arrow": "x"},
        {"manifest.json": '{"name": "an app", "icons": []}', "report.html": "its report"},
        {"manifest.json": "anything"},
        {"manifest.json": "cargo: 12 crates", "triggers.arrow": "x", "results/thesis.csv": "x"},
    ],
)
def test_a_folder_that_was_never_a_run_is_left_alone(gpt2, tmp_path, files, overwrite):
    for name, words in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(words)
    with pytest.raises(RunError, match="choose another folder") as told:
        build_index(gpt2, ["the king ."], out=tmp_path, overwrite=overwrite, quiet=True)
    assert "--overwrite" not in str(told.value)
    assert files_of(tmp_path) == files


def test_whoever_begins_anew_keeps_every_file_that_is_not_of_the_run(gpt2, tmp_path):
    build_index(gpt2, ["the king ."], out=tmp_path, quiet=True)
    mine = (
        "notes.txt",
        "results/thesis.csv",
        "results/random/mine.json",
        "figures/photo.png",
        "work/state-mine.safetensors",
    )
    ours = ("results/activity.json", "results/random/activity.parquet", "figures/fig3.svg", "report.html")
    for name in (*mine, *ours):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    index = build_index(gpt2, ["the queen left ."], out=tmp_path, overwrite=True, quiet=True)
    assert index.counts.tokens == 4
    found = set(files_of(tmp_path))
    tables = {f"{name}.arrow" for name in ("triggers", "cells", "sentences", "tokens")}
    assert found == {*mine, *tables, "manifest.json", "log.jsonl"}
    assert all((tmp_path / name).read_text() == name for name in mine)


def test_an_unfinished_file_of_a_killed_run_does_not_stand_in_the_way(gpt2, tmp_path):
    left = tmp_path / ".manifest.json.0123456789abcdef.ffmem-tmp"
    left.mkdir()
    (left / "manifest.json").write_text("half")
    build_index(gpt2, ["the king ."], out=tmp_path, quiet=True)
    assert len(open_index(tmp_path)) == 384
    assert not left.exists()


def test_an_overwrite_that_is_killed_at_the_worst_moment_can_be_given_again(gpt2, tmp_path, monkeypatch):
    build_index(gpt2, ["the king ."], out=tmp_path, quiet=True)
    (tmp_path / "notes.txt").write_text("mine")

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "write_manifest", killed)
    with pytest.raises(KeyboardInterrupt):
        build_index(gpt2, ["the queen left ."], out=tmp_path, overwrite=True, quiet=True)
    monkeypatch.undo()
    assert not (tmp_path / "triggers.arrow").exists()
    assert build_index(gpt2, ["the queen left ."], out=tmp_path, overwrite=True, quiet=True).counts.tokens == 4
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_overwrite_that_fails_before_it_begins_leaves_the_run(gpt2, tmp_path):
    build_index(gpt2, ["the king ."], out=tmp_path, quiet=True)
    before = files_of(tmp_path)

    def stopped(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(gpt2, ["the queen left ."], out=tmp_path, overwrite=True, quiet=True, announce=stopped)
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("damage", ["{", "", '{"format": 99}'])
def test_a_damaged_manifest_can_be_overwritten_where_nothing_else_lies_beside_it(gpt2, tmp_path, damage):
    build_index(gpt2, ["the king ."], out=tmp_path, quiet=True)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | json.loads(damage)) if "99" in damage else damage)
    with pytest.raises(RunError, match=r"manifest.json: (damaged|expected format 3, found 99)"):
        build_index(gpt2, ["the king ."], out=tmp_path, quiet=True)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "thesis.csv").write_text("mine")
    before = files_of(tmp_path)
    for overwrite in (False, True):
        with pytest.raises(RunError, match=r"manifest.json: damaged, and results/thesis.csv is not of the run"):
            build_index(gpt2, ["the king ."], out=tmp_path, overwrite=overwrite, quiet=True)
        assert files_of(tmp_path) == before
    (tmp_path / "results" / "thesis.csv").unlink()
    assert build_index(gpt2, ["the king ."], out=tmp_path, overwrite=True, quiet=True).counts.tokens == 3


def test_a_model_that_changed_in_memory_is_noticed(tokenizer, tmp_path):
    model = tiny_model("gpt2")
    loaded = load_model(model, tokenizer=tokenizer)
    build_index(loaded, ["the king ."], out=tmp_path / "run", quiet=True)
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight[0, 0] += 1
    with pytest.raises(RunError, match="was made with model"):
        build_index(loaded, ["the king ."], out=tmp_path / "run", quiet=True)


def test_a_run_under_a_limit_is_of_the_text_it_read(gpt2, tmp_path):
    options = {"out": tmp_path / "run", "limit_tokens": 3, "quiet": True}
    build_index(gpt2, ["the king .", "the queen ."], **options)
    build_index(gpt2, ["the king .", "the queen .", "more text that was never read"], **options)
    with pytest.raises(RunError, match="the corpus has changed"):
        build_index(gpt2, ["the war .", "the queen ."], **options)


def test_negative_coefficients_must_be_finite_too(tokenizer, tmp_path):
    model = tiny_model("llama")
    loaded = load_model(model, tokenizer=tokenizer)
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda _, args: (args[0] - torch.inf,))
    with pytest.raises(ModelError, match="layer 1 gives coefficients that are not finite"):
        build_index(loaded, ["the king ."], out=tmp_path / "run", quiet=True)


@pytest.mark.slow
def test_triggers_find_their_sentences_in_a_run_of_many_shards(gpt2, tmp_path):
    sentences = some_sentences(120, seed=8)
    index = build_index(gpt2, sentences, out=tmp_path / "run", unit="line", shard_tokens=30, top=9, quiet=True)
    assert index.counts.shards > 20
    for view in list(index)[::29]:
        for trigger in view.triggers:
            words = sentences[trigger.sentence].split()
            assert trigger.prefix == " ".join(words[: trigger.position])


def test_statistics_of_nothing_are_null_not_nan(gpt2, tmp_path):
    index = build_index(gpt2, iter(["the king ."]), out=tmp_path / "run", quiet=True)  # of unknown length: a sample
    stats = index["L1D0"].stats
    assert (stats.measured, stats.as_dict()["mean"], stats.as_dict()["q0.5"]) == (0, None, None)
    assert stats.firings <= 3
    assert "NaN" not in json.dumps(stats.as_dict())


def test_only_one_writer_at_a_time(gpt2, tmp_path):
    from ffmem.run.folder import RunFolder

    with RunFolder(tmp_path / "run").locked(), pytest.raises(RunError, match="another process is writing"):
        build_index(gpt2, ["the king ."], out=tmp_path / "run", quiet=True)


def test_a_complete_run_is_opened_though_it_cannot_be_written(gpt2, tmp_path):
    texts = ["a cat sat on the mat", "a dog ran"]
    index = build_index(gpt2, texts, out=tmp_path, quiet=True)
    with index.folder.locked():  # as where nothing may be written
        again = build_index(gpt2, texts, out=tmp_path, quiet=True)
        with pytest.raises(RunError, match="corpus"):
            build_index(gpt2, [*texts, "a bird sang"], out=tmp_path, quiet=True)
        with pytest.raises(RunError, match="another process is writing"):
            build_index(gpt2, texts, out=tmp_path, overwrite=True, quiet=True)
    assert again.manifest == index.manifest


@pytest.mark.parametrize("missing", ["the last", "one in the middle", "all"])
@pytest.mark.slow
def test_a_run_of_which_shards_have_vanished_is_not_finished(gpt2, tmp_path, monkeypatch, missing):
    """Another process may have put its own states in place of those that were here."""

    def vanished(folder, only=None, kept=checkpoint.kept):
        found = kept(folder, only)
        shards = list(found)
        gone = {"the last": shards[-1:], "one in the middle": shards[1:2], "all": shards}[missing] if len(shards) > 2 else []
        return {shard: facts for shard, facts in found.items() if shard not in gone}

    monkeypatch.setattr(checkpoint, "kept", vanished)
    with pytest.raises(RunError, match="not all shards are there that were kept"):
        build_index(gpt2, some_sentences(20, seed=2), out=tmp_path, shard_tokens=30, quiet=True)
    monkeypatch.undo()
    again = build_index(gpt2, some_sentences(20, seed=2), out=tmp_path, shard_tokens=30, quiet=True)
    assert again.counts.shards > 2


def test_the_manifest_says_what_was_made_from_what(gpt2, text_file, tmp_path):
    build_index(gpt2, text_file, out=tmp_path / "run", quiet=True)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["state"] == "complete"
    assert manifest["corpus"]["sources"] == [str(text_file)]
    assert manifest["counts"]["sentences"] == 60
    assert manifest["skipped"] == {"blank lines": 15, "headings": 1}
    assert manifest["counts"]["padding_share"] <= 0.05
    assert set(manifest["files"]) == {"triggers.arrow", "cells.arrow", "sentences.arrow", "tokens.arrow"}
    assert not (tmp_path / "run" / "work").exists()
    assert len(open_index(tmp_path / "run")) == 3 * 128


def test_an_unknown_word_shows_its_own_text_in_a_prefix(gpt2, tmp_path):
    index = build_index(gpt2, ["the Zyx left ."], out=tmp_path / "run", unit="line", quiet=True)
    prefixes = {trigger.prefix for view in index for trigger in view.triggers}
    assert "the Zyx" in prefixes


def test_a_tokenizer_without_bos_or_eos_starts_at_the_first_word(tmp_path):
    tokenizer = word_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token = None
    model = load_model(tiny_model("gpt2"), tokenizer=tokenizer)
    index = build_index(model, ["the king ."], out=tmp_path / "run", quiet=True)
    assert index.manifest.settings.bos is False
    with pytest.raises(FfmemError, match="neither a bos nor an eos"):
        build_index(model, ["the king ."], out=tmp_path / "other", bos="on", quiet=True)


def test_a_run_that_a_large_record_stopped_goes_on_with_a_larger_limit(gpt2, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "CHUNK", 100)  # so that shards before the large record are read before it
    text = tmp_path / "text.txt"
    text.write_text("the king .\n" * 40 + "the river " * 200 + "\n" + "a queen .\n")
    settings = {"shard_tokens": 50, "stats": "off", "wikitext": "keep", "quiet": True, "unit": "line"}  # not read before
    with pytest.raises(CorpusError, match=r"text.txt:41: expected a record of at most 1 kB"):
        build_index(gpt2, text, out=tmp_path / "run", max_record="1kB", **settings)
    assert checkpoint.kept(RunFolder(tmp_path / "run"))
    build_index(gpt2, text, out=tmp_path / "run", max_record="3kB", **settings)
    build_index(gpt2, text, out=tmp_path / "whole", max_record=3000, **settings)
    assert content(tmp_path / "run") == content(tmp_path / "whole")


def test_the_limit_on_records_changes_nothing_else(gpt2, text_file, tmp_path):
    runs = [
        build_index(gpt2, text_file, out=tmp_path / name, max_record=size, quiet=True).manifest
        for name, size in (("one", 1000), ("two", "2MB"))
    ]
    assert [run.corpus.max_record for run in runs] == [1000, 2_000_000]
    assert runs[0].provenance == runs[1].provenance
    assert runs[0].files == runs[1].files


MARKED = " = Rivers = \n The king @-@ sea , a <unk> <unk> , was old . \n The queen 's army ( a river ) left . \n" * 3


def texts_of(index):
    return sorted(set(index.table("sentences").column("text").to_pylist()))


def test_wikitext_marks_are_turned_back_unless_the_model_was_trained_on_them(gpt2, tokenizer, tmp_path, capsys):
    text = tmp_path / "wiki.txt"
    text.write_text(MARKED, "utf-8")
    plain = ["The king-sea, a … …, was old.", "The queen's army (a river) left."]
    kept = ["The king @-@ sea , a <unk> <unk> , was old .", "The queen 's army ( a river ) left ."]
    paper = load_model(tiny_model("adaptive_lm"), tokenizer=tokenizer)
    for name, model, wikitext, found in [
        ("auto", gpt2, "auto", plain),
        ("keep", gpt2, "keep", kept),
        ("paper", paper, "auto", kept),
        ("paper-plain", paper, "plain", plain),
    ]:
        index = build_index(model, text, out=tmp_path / name, wikitext=wikitext, top=60, distinct="none")
        assert texts_of(index) == found
        assert index.manifest.settings.wikitext == ("plain" if found == plain else "keep")
        unknown = index.manifest.skipped.pop("unknown words (<unk>) replaced by …", 0)
        assert unknown == (6 if found == plain else 0)
        assert index.manifest.skipped == {"headings": 3}
        told = "the text has WikiText's marks: turned back to plain text (--wikitext keep to leave them)"
        assert (told in capsys.readouterr().err) == (name == "auto")
    assert len({open_index(tmp_path / name).manifest.corpus.hash for name in ("auto", "keep")}) == 1


def test_text_without_wikitext_marks_and_text_that_comes_once_are_left_as_they_are(gpt2, tmp_path):
    once = build_index(gpt2, iter(MARKED.splitlines()), out=tmp_path / "once", quiet=True)
    assert once.manifest.settings.wikitext == "keep"
    without = build_index(gpt2, [MARKED.replace("@-@", ",")], out=tmp_path / "without", quiet=True)
    assert without.manifest.settings.wikitext == "keep"
    assert any(" , a <unk>" in text for text in texts_of(without))


@pytest.mark.slow
def test_what_became_of_wikitext_marks_is_settled_once(gpt2, tmp_path, monkeypatch):
    text = tmp_path / "wiki.txt"
    text.write_text(MARKED * 20, "utf-8")
    settings = {"shard_tokens": 50, "quiet": True}
    whole = build_index(gpt2, text, out=tmp_path / "whole", **settings)
    save = checkpoint.save

    def dying(folder, worker, covered, *rest):
        save(folder, worker, covered, *rest)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", dying)
        with pytest.raises(KeyboardInterrupt):
            build_index(gpt2, text, out=tmp_path / "run", **settings)
    with pytest.raises(RunError, match="made with wikitext plain, now it is keep"):
        build_index(gpt2, text, out=tmp_path / "run", wikitext="keep", **settings)
    build_index(gpt2, text, out=tmp_path / "run", wikitext="plain", **settings)
    assert content(tmp_path / "run") == content(tmp_path / "whole")
    assert build_index(gpt2, text, out=tmp_path / "whole", **settings).manifest == whole.manifest


@pytest.mark.slow
def test_a_run_of_a_sample_is_that_of_its_records_alone_and_is_continued(gpt2, tmp_path, monkeypatch, capsys):
    lines = [sentence for sentence in some_sentences(120, seed=8) if sentence.strip()]
    text = tmp_path / "text.txt"
    text.write_text("\n".join(lines), "utf-8")
    settings = {"shard_tokens": 60, "batch_tokens": 64, "stats": "full", "unit": "line"}
    whole = build_index(gpt2, text, out=tmp_path / "whole", sample=40, seed=5, **settings)
    manifest = whole.manifest
    assert (manifest.settings.sample, manifest.settings.seed) == (40, 5)
    assert sum(manifest.corpus.records) == len(lines)
    assert manifest.counts.records == 40
    assert manifest.skipped == {"records outside the sample": len(lines) - 40}
    drawn = [lines[number - 1] for number in sample_of(manifest).numbers]
    in_one = settings | {"shard_tokens": 10_000, "quiet": True}  # parts are cut in the whole text, so batches are others
    build_index(gpt2, text, out=tmp_path / "sample", sample=40, seed=5, **in_one)
    build_index(gpt2, drawn, out=tmp_path / "alone", **in_one)
    for name in manifest.files:
        assert (tmp_path / "sample" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    save = checkpoint.save

    def dying(folder, worker, covered, *rest):
        save(folder, worker, covered, *rest)
        if len(covered) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", dying)
        with pytest.raises(KeyboardInterrupt):
            build_index(gpt2, text, out=tmp_path / "run", sample=40, seed=5, **settings)
        patch.setattr(Corpus, "count", None)  # counted once only
        with pytest.raises(RunError, match="made with seed 5, now it is 6"):
            build_index(gpt2, text, out=tmp_path / "run", sample=40, seed=6, **settings)
        with pytest.raises(RunError, match="made with sample 40, now it is None"):
            build_index(gpt2, text, out=tmp_path / "run", **settings)
        patch.setattr(checkpoint, "save", save)
        build_index(gpt2, text, out=tmp_path / "run", sample=40, seed=5, **settings)
        build_index(gpt2, text, out=tmp_path / "run", sample=40, seed=5, **settings)  # opens it
    assert content(tmp_path / "run") == content(tmp_path / "whole")
    assert "the sample is all of them" not in capsys.readouterr().err
    build_index(gpt2, text, out=tmp_path / "all", sample=1000, **settings)
    assert f"the text has {len(lines)} records: the sample is all of them" in capsys.readouterr().err
