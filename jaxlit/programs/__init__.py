"""What a program tells: where its results come from, how those of replicas relate to the batch's, and what it costs."""
