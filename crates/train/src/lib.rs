//! The training loop of Flash-GRPO and the pretraining of its embedded model.
//!
//! Start reading at [`iteration`](mod@iteration): prompts -> plan -> rollout -> reward -> advantages -> update.

pub mod batch;
pub mod checkpoint;
pub mod checks;
pub mod collective;
pub mod compare;
pub mod embedding_cache;
mod error;
pub mod evaluate;
pub mod events;
mod fault;
pub mod first_frames;
pub mod guards;
pub mod inputs;
pub mod iteration;
pub mod optimizer;
pub mod plan;
pub mod policy;
pub mod pool;
pub mod pretrain;
pub mod prompts;
pub mod recording;
pub mod replay;
pub mod reward_advantage;
pub mod rollout;
pub mod run;
pub mod run_folder;
pub mod scoring;
pub mod settings;
pub mod sharing;
mod stats;
pub mod step_metrics;
pub mod stop;
pub mod trainer;
pub mod update;
pub mod watchdog;

pub use error::{Error, Result};
