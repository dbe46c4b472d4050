"""Who runs the model: in this process, or in others. Hands one step down and one result up."""
