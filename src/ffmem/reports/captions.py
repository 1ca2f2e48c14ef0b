"""What a reader who has not read the paper should see in each figure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Caption:
    """A figure's number, its heading, two sentences of what to see, and a text for those who cannot see it."""

    number: str
    title: str
    see: str
    alt: str


CAPTIONS = {
    "fig3": Caption(
        "Fig 3",
        "Which token does a key look at?",
        "One token of each trigger was taken away and the coefficient read again: the further below zero a curve is, the "
        "more the key relied on that token. In the paper the last token matters most in every layer, and less so in upper "
        "layers, where keys look at the whole prefix rather than at how it ends.",
        "Relative change of coefficients without the first, the last or a random token, a point a layer, and the paper's.",
    ),
    "fig4": Caption(
        "Fig 4",
        "Does a value predict what follows its key's trigger?",
        "A cell agrees if the token that its value puts first is the one that followed the prefix that fires it most. "
        "In the paper hardly any cell of the lower layers agrees and a few in a hundred do at the top; the dotted curve is "
        "what pairing keys with other cells' values gives.",
        "Share of cells whose value predicts the next token of their top trigger, a point a layer, and the paper's.",
    ),
    "fig5": Caption(
        "Fig 5",
        "How far down does a value rank that token?",
        "Rank 1 is the token that the value puts first, so lower is better; the band is the middle half of a layer's cells. "
        "Ranks depend on the size of the vocabulary (267,744 words in the paper): compare the slopes, not the heights.",
        "Rank of the next token in the value's distribution, median and quartiles a layer, and the paper's median.",
    ),
    "fig6": Caption(
        "Fig 6",
        "Do values that are sure of a token agree more often?",
        "Cells are sorted into eight bins by the largest probability that their value gives to any token, the least sure on "
        "the left. In the paper agreement grows from bin to bin. Bins on the right often hold only a handful of cells: "
        "hollow bars are of fewer than 30 cells (n says how many), and a bin without cells says none.",
        "Share of agreeing cells in eight bins of the value's largest probability, and the paper's.",
    ),
    "fig7": Caption(
        "Fig 7",
        "How many memories take part in one prediction?",
        "The share of a layer's cells with a coefficient above zero, median and middle half over the examples. Where an "
        "activation is hardly ever zero that says little, so a second curve counts the cells that carry nine tenths of the "
        "mass (size of coefficient × length of value).",
        "Share of active cells, median and quartiles a layer, the cells with most of the mass, and the paper's median.",
    ),
    "fig8": Caption(
        "Fig 8",
        "Does a layer say something that none of its memories says?",
        "A bar is the share of examples in which no cell's own top token is the top token of the layer's output: the layer "
        "composed a new prediction. In the paper that happens in at least 68% of examples in every layer.",
        "Share of examples where no memory agrees with the layer's prediction, a bar a layer, and the paper's.",
    ),
    "fig9": Caption(
        "Fig 9",
        "When does the stream already hold the final word?",
        "A bar is the share of examples in which the residual stream, read before a layer's memories are added, already "
        "puts the model's final word first. In the paper a third is decided in the bottom layers, and the share grows "
        "to the top.",
        "Share of examples where the residual's top token is the model's output, a bar a layer, and the paper's.",
    ),
    "fig10": Caption(
        "Fig 10",
        "How sure is the stream of the final word?",
        "The probability that the residual stream gives to the model's final word, median and middle half over examples. "
        "In the paper it rises from layer to layer: predictions are refined rather than made in one place.",
        "Probability of the model's output in the residual, median and quartiles a layer, and the paper's median.",
    ),
    "fig11": Caption(
        "Fig 11",
        "Who decides in a layer: the stream, the memories, or their sum?",
        "Each example is one of four cases: the layer keeps the stream's word (residual), takes its memories' (ffn), both "
        "said the same (agreement), or the sum says something that neither did (composition). In the paper memories hardly "
        "ever win alone; where the word changes, it is mostly a compromise.",
        "Stacked bars of residual, composition, agreement and ffn cases a layer, for this model and for the paper.",
    ),
    "normaliser": Caption(
        "Section 2",
        "Does the missing softmax matter?",
        "A neural memory shares attention out among its cells by a softmax; a feed-forward layer is the same without it. "
        "First the loss when one layer is given the softmax (as it is, or with coefficients of the same length), then how "
        "many cells effectively take part, with and without; the paper has no numbers for this.",
        "Change of loss with a softmax in one layer at a time, and the effective number of memories with and without.",
    ),
}
