"""What a caller gets back: outputs, log probabilities, embeddings."""
