//! The training loop of Flash-GRPO and the pretraining of its embedded model.

pub mod collective;
pub mod optimizer;
pub mod policy;
pub mod pretrain;
pub mod replay;
pub mod rollout;
pub mod settings;
pub mod update;
