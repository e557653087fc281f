"""What a traced program tells: where its results come from, and how those of replicas relate to the whole batch's."""
