"""The paper's experiments, one module a question: (model, index, corpus, seed) -> Result."""
