"""Mixed load above capacity for minutes: errors, memory, books, how pages lie."""
