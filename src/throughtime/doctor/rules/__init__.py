"""The rules of the doctor, one module per subject: the graph, the state, the gradients."""
