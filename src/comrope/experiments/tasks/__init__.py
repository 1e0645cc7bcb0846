"""What a run learns: data, model, loss and evaluation of one kind of data each."""
