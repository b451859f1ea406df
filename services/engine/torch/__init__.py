"""The torch runner: Hugging Face model definitions over our page pool."""
