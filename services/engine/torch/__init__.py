"""The torch runner computes Hugging Face model definitions over our page pool."""
