"""The paper's experiments: recipes, data, training, evaluation, tables, figures, command line."""
