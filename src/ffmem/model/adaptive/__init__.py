"""The paper's language model: adaptive input, adaptive softmax, ReLU memories, sinusoidal positions."""
