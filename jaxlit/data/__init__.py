"""From a user's loader to a batch that a step can take."""
