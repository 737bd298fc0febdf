//! The training loop of Flash-GRPO and the pretraining of its embedded model.
//!
//! Start reading at [`iteration`](mod@iteration): prompts -> plan -> rollout -> reward -> advantages -> update.

pub mod iteration;
pub mod rollout;
pub mod replay;
pub mod update;
pub mod optimizer;
pub mod policy;
pub mod prompts;
pub mod evaluate;
pub mod checks;
pub mod trainer;
pub mod run;
pub mod checkpoint;
pub mod recording;
pub mod events;
pub mod collective;
pub mod settings;
pub mod pretrain;
mod error;

pub use error::{Error, Result};
