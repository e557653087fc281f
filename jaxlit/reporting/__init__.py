"""What a run shows and sends away: the terminal, pictures, histograms, Weights & Biases."""
