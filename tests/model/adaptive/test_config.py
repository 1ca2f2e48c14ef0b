"""The shape of the model: bands of words, what is refused, and what a folder keeps."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from ffmem.model.adaptive.config import AdaptiveConfig, BandShape
from ffmem.model.adaptive.network import register


def test_the_default_is_the_papers_model():
    config = AdaptiveConfig()
    assert config.bands == [BandShape(0, 20000, 1024), BandShape(20000, 60000, 256), BandShape(60000, 267744, 64)]
    assert [band.size for band in config.bands] == [20000, 40000, 207744]
    assert (config.num_hidden_layers, config.num_attention_heads, config.intermediate_size) == (16, 8, 4096)
    assert (config.max_position_embeddings, config.use_cache) == (512, True)


def test_special_tokens_are_those_of_a_fairseq_dictionary_unless_others_are_given():
    config = AdaptiveConfig()
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (1, 2, 2)
    assert AdaptiveConfig(pad_token_id=None, eos_token_id=7).to_dict().items() >= {
        ("pad_token_id", None),
        ("bos_token_id", 2),
        ("eos_token_id", 7),
    }


@given(st.sets(st.integers(1, 400), min_size=2, max_size=5).map(sorted), st.integers(1, 3))
def test_bands_hold_every_word_once_and_each_is_narrower_by_the_factor(edges, factor):
    *cutoffs, size = edges
    config = AdaptiveConfig(vocab_size=size, hidden_size=216, num_attention_heads=1, cutoffs=cutoffs, factor=factor)
    assert [word for band in config.bands for word in range(band.low, band.high)] == list(range(size))
    assert sum(band.size for band in config.bands) == size
    assert [band.width for band in config.bands] == [216 // factor**number for number in range(len(cutoffs) + 1)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cutoffs": []}, "expected 1 to 64 rising cutoffs below vocab_size 100, found []"),
        (
            {"cutoffs": [*range(1, 66)]},
            "expected 1 to 64 rising cutoffs below vocab_size 100, found [1, 2, 3, 4, 5, 6, ...]",
        ),
        ({"cutoffs": [60, 20]}, "expected 1 to 64 rising cutoffs below vocab_size 100, found [60, 20]"),
        ({"cutoffs": [20, 20]}, "expected 1 to 64 rising cutoffs below vocab_size 100, found [20, 20]"),
        ({"cutoffs": [20, 100]}, "expected 1 to 64 rising cutoffs below vocab_size 100, found [20, 100]"),
        ({"cutoffs": [0, 20]}, "expected 1 to 64 rising cutoffs below vocab_size 100, found [0, 20]"),
        ({"cutoffs": (-3, 20)}, "expected 1 to 64 rising cutoffs below vocab_size 100, found [-3, 20]"),
        ({"hidden_size": 30}, "expected an even hidden_size divided by 4 heads, found 30"),
        ({"hidden_size": 9, "num_attention_heads": 3}, "expected an even hidden_size divided by 3 heads, found 9"),
        ({"factor": 6}, "factor 6 leaves no width for the last band of hidden_size 32"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_in_one_line(settings, message):
    shape = {"vocab_size": 100, "hidden_size": 32, "num_attention_heads": 4, "cutoffs": [20, 60]}
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        AdaptiveConfig(**(shape | settings))
    assert str(caught.value) == message


@pytest.mark.parametrize("settings", [{"factor": 0}, {"factor": -4}, {"num_attention_heads": 0}], ids=str)
def test_numbers_below_one_are_refused(settings):
    with pytest.raises(ValueError, match="expected"):
        AdaptiveConfig(**settings)


def test_a_stream_too_narrow_for_sinusoids_is_refused():
    with pytest.raises(ValueError, match="hidden_size"):
        AdaptiveConfig(vocab_size=4, hidden_size=2, num_attention_heads=1, cutoffs=[2], factor=2)


@pytest.mark.parametrize("load", [AdaptiveConfig.from_pretrained, AutoConfig.from_pretrained], ids=["own", "auto"])
def test_a_folder_keeps_all_of_it(tmp_path, load):
    register()
    settings = {
        "vocab_size": 90,
        "hidden_size": 24,
        "num_hidden_layers": 5,
        "num_attention_heads": 3,
        "intermediate_size": 7,
        "cutoffs": [10, 30, 70],
        "factor": 2,
        "max_position_embeddings": 33,
        "use_cache": False,
        "pad_token_id": 0,
    }
    config = AdaptiveConfig(**settings)
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text("utf-8"))["model_type"] == "adaptive_lm"
    loaded = load(tmp_path)
    assert type(loaded) is AdaptiveConfig
    config._name_or_path = loaded._name_or_path  # AutoConfig tells where it was found
    assert loaded.to_dict() == config.to_dict()
    assert {name: getattr(loaded, name) for name in settings} == settings
    assert loaded.bands == config.bands
    assert [band.width for band in loaded.bands] == [24, 12, 6, 3]


@pytest.mark.parametrize("asked", [True, False])
def test_there_is_no_second_table_to_tie(asked):
    assert AdaptiveConfig(tie_word_embeddings=asked).tie_word_embeddings is False
