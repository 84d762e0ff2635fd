"""The evidence: a float64 oracle, goldens made by another implementation, and the recipe both are fed from."""
