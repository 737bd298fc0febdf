//! What videos start with: a picture for each prompt, for models of image-to-video.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::{Device, Tensor, TensorData};
use rayon::prelude::*;
use video::{Frames, Picture};
use wan::clip::ClipVision;
use wan::image::{ImageCondition, ImageInput, StartImage};
use wan::vae::AutoencoderKlWan;

use crate::error::{Error, Result};
use crate::settings::{Prompt, SamplingSettings, SettingsError};

/// Encoded pictures that are kept: neighbouring micro-batches are of few prompts.
pub(crate) const KEPT: usize = 4;

/// The pictures of a list of prompts. They are read and encoded when it is their prompt's turn: all of them would not fit into memory.
#[derive(Debug, Clone)]
pub struct FirstFrames {
    /// By prompt.
    paths: Vec<PathBuf>,
    /// Those encoded last, by prompt.
    recent: Arc<Mutex<Vec<(usize, ImageCondition)>>>,
}

impl FirstFrames {
    /// Those of `prompts`, which the recipe names in `field`: one each, or none, as the model's `input` has it. All are read once, to know that they can be.
    ///
    /// # Errors
    /// A prompt without a picture, or with one that the model has no use for; a picture that cannot be read.
    pub fn of(prompts: &[Prompt], field: &str, input: ImageInput) -> Result<Option<Self>> {
        const EVERY: &str = "name a file that ends in `.jsonl`, with lines like `{\"prompt\": \"a red fox\", \"image\": \"fox.png\"}`";
        let with = prompts.iter().position(|prompt| prompt.image.is_some());
        let without = prompts.iter().position(|prompt| prompt.image.is_none());
        let error = |index: usize, what: &str, hint: &str| {
            let message = format!("prompt {}, `{}`, {what}", index + 1, prompts[index].text);
            Err(Error::from(SettingsError::new(field, field, message, hint)))
        };
        match (input, with, without) {
            (ImageInput::None, Some(index), _) => {
                let hint = "leave `image` out, or train a model of image-to-video";
                return error(index, "has an image, but the model makes videos of text alone", hint);
            }
            (ImageInput::Channels, _, Some(index)) => return error(index, "has no image, but the model makes videos of images", EVERY),
            (ImageInput::FirstFrame, Some(_), Some(index)) => return error(index, "has no image, but others have one", EVERY),
            (ImageInput::None | ImageInput::FirstFrame, None, _) => return Ok(None),
            (ImageInput::Channels | ImageInput::FirstFrame, _, None) => {}
        }
        let paths: Vec<PathBuf> = prompts.iter().filter_map(|prompt| prompt.image.clone()).collect();
        paths.par_iter().try_for_each(|path| Picture::read(path).map(drop).map_err(Error::Picture))?;
        Ok(Some(Self { paths, recent: Arc::default() }))
    }

    /// What the networks know of the pictures of some prompts. Each is encoded by itself, so that its bits depend on no other.
    ///
    /// # Errors
    /// A picture that cannot be read any more.
    pub fn condition(&self, prompts: &[usize], readers: &Readers<'_>) -> Result<ImageCondition> {
        Ok(ImageCondition::cat(prompts.iter().map(|&prompt| self.one(prompt, readers)).collect::<Result<_>>()?))
    }

    fn one(&self, prompt: usize, readers: &Readers<'_>) -> Result<ImageCondition> {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, condition)) = recent.iter().find(|(kept, _)| *kept == prompt) {
            return Ok(condition.clone());
        }
        let Readers { input, vae, encoder, size, device } = *readers;
        let picture = Picture::read(&self.paths[prompt]).map_err(Error::Picture)?;
        let image = start(&picture, size.height, size.width, encoder.map(|encoder| encoder.config.image_size), device);
        let condition = ImageCondition::new(input, vae, encoder, image, size.num_frames);
        if recent.len() == KEPT {
            recent.remove(0);
        }
        recent.push((prompt, condition.clone()));
        Ok(condition)
    }
}

/// What looks at a picture, and at which size.
#[derive(Clone, Copy)]
pub struct Readers<'a> {
    /// How the network knows it.
    pub input: ImageInput,
    /// Encodes it as the first frame.
    pub vae: &'a AutoencoderKlWan,
    /// Says what is in it, where the network attends to that.
    pub encoder: Option<&'a ClipVision>,
    /// Size of the videos.
    pub size: &'a SamplingSettings,
    /// Where they are.
    pub device: &'a Device,
}

/// A picture as the first frame of a video of the given size, and as a square for an image encoder, if there is one.
///
/// # Panics
/// If a size is 0 or above 16384.
pub fn start(picture: &Picture, height: usize, width: usize, square: Option<usize>, device: &Device) -> StartImage {
    let tensor = |frames: Frames| {
        let shape = [1, frames.height(), frames.width(), 3];
        Tensor::<4>::from_data(TensorData::new(frames.into_data(), shape), device).permute([0, 3, 1, 2])
    };
    StartImage { frame: tensor(picture.stretched(height, width)), square: square.map(|side| tensor(picture.square(side))) }
}
