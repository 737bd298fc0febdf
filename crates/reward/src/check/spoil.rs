//! Bad videos, out of good ones.

use sha2::{Digest, Sha256};
use video::Frames;

use super::Bad;
use crate::Sample;

/// Videos that should score low, with what is wrong with them.
pub struct Spoiled<'a> {
    /// What is wrong.
    pub name: &'static str,
    /// What was asked for, as a sample of which all but the frames counts, and frames in place of its own.
    pub clips: Vec<(Sample<'a>, Frames)>,
}

impl Spoiled<'_> {
    /// As [`super::check`] takes them.
    pub fn bad(&self) -> Bad<'_> {
        Bad { name: self.name, samples: self.clips.iter().map(|(asked, frames)| Sample { frames, ..*asked }).collect() }
    }
}

/// The usual ways to be bad, for every good sample:
///
/// ```text
/// other prompt    the frames with the next different prompt of the set, and what belongs to it; absent with a single prompt
/// still           the first frame, F times
/// noise           uniform noise of the same size
/// grey            the mean colour of the clip, everywhere
/// ```
pub fn spoil<'a>(good: &[Sample<'a>]) -> Vec<Spoiled<'a>> {
    let each = |name, of: &dyn Fn(&Sample<'_>) -> Option<Frames>| {
        let clip = |sample: &Sample<'a>| Some((*sample, of(sample)?));
        Spoiled { name, clips: good.iter().filter_map(clip).collect() }
    };
    let spoiled = [
        Spoiled { name: "other prompt", clips: other_prompts(good) },
        each("still", &|sample| same_size(sample.frames, sample.frames.frame(0).iter().copied().cycle())),
        each("noise", &|sample| same_size(sample.frames, noise(sample.prompt))),
        each("grey", &|sample| same_size(sample.frames, mean_color(sample.frames).into_iter().cycle())),
    ];
    spoiled.into_iter().filter(|spoiled| !spoiled.clips.is_empty()).collect()
}

fn other_prompts<'a>(good: &[Sample<'a>]) -> Vec<(Sample<'a>, Frames)> {
    let other = |i: usize| good.iter().cycle().skip(i + 1).take(good.len()).find(|sample| sample.prompt != good[i].prompt);
    (0..good.len()).filter_map(|i| Some((*other(i)?, good[i].frames.clone()))).collect()
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
