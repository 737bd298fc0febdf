//! Shared by the tests.

#[allow(dead_code, reason = "not every test uses all of it")]
#[path = "../../../wan/tests/common/device.rs"]
pub mod device;

use burn::tensor::Tensor;
use train::replay::{TransitionBatch, pick};
use wan::text::PromptEmbeds;

/// All transitions of a rollout in one batch, in the order of the samples, of which each has one.
pub fn merge(parts: &[TransitionBatch]) -> TransitionBatch {
    let mut order: Vec<usize> = parts.iter().flat_map(|part| part.samples.clone()).collect();
    let places: Vec<usize> = (0..order.len()).map(|sample| order.iter().position(|&s| s == sample).expect("one each")).collect();
    order.sort_unstable();
    let stack = |of: &dyn Fn(&TransitionBatch) -> Tensor<5>| pick(&Tensor::cat(parts.iter().map(of).collect(), 0), &places);
    fn flat<T: Copy>(parts: &[TransitionBatch], places: &[usize], of: impl Fn(&TransitionBatch) -> Vec<T>) -> Vec<T> {
        let all: Vec<T> = parts.iter().flat_map(of).collect();
        places.iter().map(|&place| all[place]).collect()
    }
    let mut conditioning = parts[0].conditioning.clone();
    for part in &parts[1..] {
        let offset = conditioning.prompts.batch_size();
        conditioning.prompts = PromptEmbeds::cat(&conditioning.prompts, &part.conditioning.prompts);
        conditioning.prompt_of.extend(part.conditioning.prompt_of.iter().map(|prompt| prompt + offset));
    }
    conditioning.prompt_of = places.iter().map(|&place| conditioning.prompt_of[place]).collect();
    TransitionBatch {
        latents: stack(&|part| part.latents.clone()),
        next_latents: stack(&|part| part.next_latents.clone()),
        old_velocity: Some(stack(&|part| part.old_velocity.clone().expect("recorded"))),
        retained: None,
        owners: flat(parts, &places, |part| part.owners.clone()),
        steps: flat(parts, &places, |part| part.steps.clone()),
        old_log_probs: flat(parts, &places, |part| part.old_log_probs.clone()),
        advantages: flat(parts, &places, |part| part.advantages.clone()),
        conditioning,
        samples: order,
    }
}
