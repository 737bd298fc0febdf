//! Groups of rollouts that are compared with each other.

use std::ops::Range;

use crate::Error;

/// `num_prompts` groups of `group_size` rollouts, stored prompt-major: sample `i` is rollout `i % group_size` of prompt
/// `i / group_size`.
///
/// Groups go by position, never by prompt text: two equal prompts stay two groups (Deviation D4, docs/deviations.md).
/// Invariant: no ragged groups, and at least two rollouts in each, since the advantage of a single rollout is always 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupLayout {
    num_prompts: usize,
    group_size: usize,
}

impl GroupLayout {
    /// # Errors
    /// No prompts, or a group of fewer than two rollouts.
    pub fn new(num_prompts: usize, group_size: usize) -> Result<GroupLayout, Error> {
        if num_prompts == 0 {
            return Err(Error::out_of_range("prompts_per_iteration", num_prompts, "at least 1", "24 is the published value"));
        }
        if group_size < 2 {
            let hint = "a rollout is judged against the others of its prompt; 8 or more is stable";
            return Err(Error::out_of_range("group_size", group_size, "at least 2", hint));
        }
        Ok(GroupLayout { num_prompts, group_size })
    }

    /// Number of prompts, one group each.
    pub fn num_prompts(&self) -> usize {
        self.num_prompts
    }

    /// Rollouts per prompt.
    pub fn group_size(&self) -> usize {
        self.group_size
    }

    /// Number of rollouts in the batch.
    pub fn num_samples(&self) -> usize {
        self.num_prompts.saturating_mul(self.group_size)
    }

    /// Prompt of a sample.
    pub fn prompt(&self, sample: usize) -> usize {
        sample / self.group_size
    }

    /// Place of a sample in its group.
    pub fn rollout(&self, sample: usize) -> usize {
        sample % self.group_size
    }

    /// The samples of a prompt.
    pub fn samples(&self, prompt: usize) -> Range<usize> {
        prompt * self.group_size..(prompt + 1) * self.group_size
    }
}
