"""What is trained and how: the sizes, and the few numbers of the optimiser."""

from __future__ import annotations

from dataclasses import dataclass

from ffmem.errors import FfmemError
from ffmem.model.adaptive.config import AdaptiveConfig


@dataclass(frozen=True)
class Recipe:
    """A shape of the paper's kind and the numbers it is trained with."""

    d: int
    cells: int
    heads: int
    layers: int = 16
    cutoffs: tuple[int, ...] = (20000, 60000)
    context: int = 512
    rate: float = 1.2e-3
    """The peak learning rate of AdamW; it falls to zero in a straight line."""
    warmup: int = 400
    """Number of first steps over which the learning rate climbs to its peak."""
    decay: float = 0.1
    """Weight decay of the blocks' matrices. Words, norms and biases have none: a rare word must not fade between two
    of its sightings."""
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float = 1.0
    windows: tuple[tuple[int, int], ...] = ((256, 288), (64, 384))
    """Of each kind of window that a step reads, its tokens and how many there are. Every window begins with a sentence; the
    short ones teach what the analysis asks for, sentences without a context."""

    def config(self, vocab_size: int) -> AdaptiveConfig:
        """The network's shape; in a vocabulary too small for these bands, the rarer half of the words is the tail."""
        return AdaptiveConfig(
            vocab_size=vocab_size,
            hidden_size=self.d,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=self.cells,
            cutoffs=[cutoff for cutoff in self.cutoffs if cutoff < vocab_size] or [vocab_size // 2],
            max_position_embeddings=self.context,
        )


SIZES = {
    "small": Recipe(d=256, cells=1024, heads=4, rate=1.5e-3),
    "medium": Recipe(d=384, cells=1536, heads=6),
    "paper": Recipe(d=1024, cells=4096, heads=8, rate=5e-4),
}


def recipe_of(size: str | Recipe) -> Recipe:
    """The recipe of a size by its name, or the recipe itself where one is given."""
    if isinstance(size, Recipe):
        return size
    if size not in SIZES:
        raise FfmemError(f"expected size {', '.join(SIZES)}, found {size!r}")
    return SIZES[size]
