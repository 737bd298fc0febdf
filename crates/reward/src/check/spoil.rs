//! Bad videos, out of good ones.

use std::borrow::Cow;

use sha2::{Digest, Sha256};
use video::Frames;

use crate::{Reward, Sample, Scored};

/// A way to be bad.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spoil {
    /// The frames with the next different prompt of the set, and what belongs to it; absent with a single prompt.
    OtherPrompt,
    /// The first frame, F times.
    Still,
    /// Uniform noise of the same size.
    Noise,
    /// The mean colour of the clip, everywhere.
    Grey,
}

impl Spoil {
    /// Every way.
    pub const ALL: [Self; 4] = [Self::OtherPrompt, Self::Still, Self::Noise, Self::Grey];

    /// What is wrong.
    pub fn name(self) -> &'static str {
        match self {
            Self::OtherPrompt => "other prompt",
            Self::Still => "still",
            Self::Noise => "noise",
            Self::Grey => "grey",
        }
    }

    /// Every good sample made bad: a sample of which all but the frames counts, and frames in place of its own.
    pub fn clips<'a>(self, good: &[Sample<'a>]) -> Vec<(Sample<'a>, Cow<'a, Frames>)> {
        match self {
            Self::OtherPrompt => other_prompts(good),
            Self::Still => each(good, |frames, _| same_size(frames, frames.frame(0).iter().copied().cycle())),
            Self::Noise => each(good, |frames, prompt| same_size(frames, noise(prompt))),
            Self::Grey => each(good, |frames, _| same_size(frames, mean_color(frames).into_iter().cycle())),
        }
    }

    /// Scores of those; the clips are gone when it returns, because at full size they are gigabytes.
    pub(super) fn score(self, reward: &dyn Reward, good: &[Sample<'_>]) -> Vec<Scored> {
        let clips = self.clips(good);
        let samples: Vec<Sample<'_>> = clips.iter().map(|(asked, frames)| Sample { frames, ..*asked }).collect();
        if samples.is_empty() { Vec::new() } else { reward.score(&samples) }
    }
}

fn other_prompts<'a>(good: &[Sample<'a>]) -> Vec<(Sample<'a>, Cow<'a, Frames>)> {
    let other = |i: usize| good.iter().cycle().skip(i + 1).take(good.len()).find(|sample| sample.prompt != good[i].prompt);
    (0..good.len()).filter_map(|i| Some((*other(i)?, Cow::Borrowed(good[i].frames)))).collect()
}

fn each<'a>(good: &[Sample<'a>], of: impl Fn(&Frames, &str) -> Option<Frames>) -> Vec<(Sample<'a>, Cow<'a, Frames>)> {
    good.iter().filter_map(|sample| Some((*sample, Cow::Owned(of(sample.frames, sample.prompt)?)))).collect()
}

fn same_size(like: &Frames, values: impl Iterator<Item = f32>) -> Option<Frames> {
    Frames::new(like.num_frames(), like.height(), like.width(), values.take(like.data().len()).collect()).ok()
}

fn mean_color(frames: &Frames) -> [f32; 3] {
    let pixels = (frames.data().len() / 3) as f32;
    [0, 1, 2].map(|channel| frames.data().iter().skip(channel).step_by(3).map(|value| value.clamp(0.0, 1.0)).sum::<f32>() / pixels)
}

/// Numbers in [0, 1), a function of the key (SHA-256 in counter mode).
fn noise(key: &str) -> impl Iterator<Item = f32> {
    (0u64..).flat_map(move |block| {
        let digest = Sha256::new().chain_update(key).chain_update(block.to_le_bytes()).finalize();
        digest.into_iter().map(|byte| f32::from(byte) / 256.0)
    })
}
