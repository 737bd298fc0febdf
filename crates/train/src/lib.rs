//! The training loop of Flash-GRPO and the pretraining of its embedded model.

pub mod optimizer;
pub mod pretrain;
pub mod settings;
