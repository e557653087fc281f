"""What tests share: modules, trainers, batches, loops by hand, journals."""
