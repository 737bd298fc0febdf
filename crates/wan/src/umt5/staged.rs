//! The encoder for a machine that cannot hold it: one layer in memory at a time.
//!
//! UMT5-XXL has 5.7B parameters, 22.7 GB in f32, and is needed for a list of prompts only. Here the embedding's rows are read one by one
//! from the file and every layer is loaded, applied to all prompts and dropped: the memory of one layer (772 MB) and of a group of tokens; the
//! others wait in the memory of the host.

use super::{Block, EMBEDDING_NAMES, Positions, Umt5Config, Umt5Encoder};
use crate::error::{Error, Result};
use crate::layers::RmsNorm;
use crate::weights::{WeightFiles, Weights};
use burn::tensor::{DType, Device, Tensor, TensorData};
use std::path::Path;

/// Tokens that a layer sees at once.
const TOKENS_AT_ONCE: usize = 4096;

/// Embeddings [n, D] of token ids, in f32, without any graph and on the CPU, from the files of a `text_encoder` folder. An embedding depends on
/// its own ids alone. `progress(done, total)` is called after every layer.
///
/// # Errors
/// As [`Umt5Encoder::load`]; an id that the encoder has no row for.
pub fn encode_in_stages(dir: &Path, ids: &[Vec<u32>], device: &Device, progress: &mut dyn FnMut(usize, usize)) -> Result<Vec<Tensor<2>>> {
    let config = Umt5Config::load(dir)?;
    let files = WeightFiles::open_folder(dir, "model")?;
    let name = check_files(&files, &config)?;
    let groups = groups(ids);
    let embed = |ids: &&[Vec<u32>]| embedded(&files, name, &config, ids);
    let mut hidden: Vec<Tensor<3>> = groups.iter().map(embed).collect::<Result<_>>()?;
    let lengths: Vec<Vec<usize>> = groups.iter().map(|ids| ids.iter().map(Vec::len).collect()).collect();
    let Some(longest) = ids.iter().map(Vec::len).max() else { return Ok(Vec::new()) };
    let positions = Positions::new(&config, longest, &[longest], device);
    let weights = Weights::from_files(files, device, DType::F32);
    let encoder = weights.sub("encoder");
    for layer in 0..config.num_layers {
        let block = Block::new(&encoder.sub("block").sub(layer), &config);
        weights.forget();
        let bias = block.position_bias(&positions);
        for (x, lengths) in hidden.iter_mut().zip(&lengths) {
            *x = block.forward_each(x.clone().to_device(device), lengths, &bias).to_device(&Device::flex());
        }
        progress(layer + 1, config.num_layers);
    }
    let norm = RmsNorm::new(&encoder.sub("final_layer_norm"), config.d_model, config.layer_norm_epsilon);
    let normed = |x: Tensor<3>| norm.forward(x.to_device(device)).to_device(&Device::flex());
    let rows = hidden.into_iter().zip(&lengths).flat_map(|(x, lengths)| split(normed(x), lengths));
    Ok(rows.collect())
}

/// Whether files hold an encoder of `config`; the name of the embedding in them.
///
/// # Errors
/// As [`WeightFiles::check`].
pub(super) fn check_files(files: &WeightFiles, config: &Umt5Config) -> Result<&'static str> {
    let name = EMBEDDING_NAMES.into_iter().find(|name| files.contains(name)).unwrap_or(EMBEDDING_NAMES[0]);
    let mut declared = Weights::declared(|w| Umt5Encoder::new(config.clone(), &w))?;
    declared[0].name = name.to_owned();
    files.check(&declared, &EMBEDDING_NAMES)?;
    Ok(name)
}

/// Consecutive sequences of about [`TOKENS_AT_ONCE`] tokens.
fn groups(ids: &[Vec<u32>]) -> Vec<&[Vec<u32>]> {
    let (mut groups, mut start, mut tokens) = (Vec::new(), 0, 0);
    for (i, ids_of_one) in ids.iter().enumerate() {
        if i > start && tokens + ids_of_one.len() > TOKENS_AT_ONCE {
            groups.push(&ids[start..i]);
            (start, tokens) = (i, 0);
        }
        tokens += ids_of_one.len();
    }
    if start < ids.len() {
        groups.push(&ids[start..]);
    }
    groups
}

/// The rows of the embedding [1, tokens, D].
fn embedded(files: &WeightFiles, name: &str, config: &Umt5Config, ids: &[Vec<u32>]) -> Result<Tensor<3>> {
    let dim = config.d_model;
    let mut values = Vec::new();
    for &id in ids.iter().flatten() {
        let id = id as usize;
        if id >= config.vocab_size {
            let reason = format!("token {id}, but the text encoder has vocab_size {}", config.vocab_size);
            return Err(Error::invalid(&files.path, reason, "tokenizer/ and text_encoder/ must belong together"));
        }
        values.extend(files.floats_of(name, id * dim..(id + 1) * dim)?);
    }
    let tokens = values.len() / dim;
    Ok(Tensor::from_data(TensorData::new(values, [1, tokens, dim]), &Device::flex()))
}

/// x [1, sum of lengths, D] as one [n, D] per sequence, each with its own memory.
fn split(x: Tensor<3>, lengths: &[usize]) -> Vec<Tensor<2>> {
    let x = x.squeeze_dim::<2>(0);
    let mut from = 0;
    let part = |&length: &usize| {
        let part = x.clone().narrow(0, from, length);
        from += length;
        part
    };
    lengths.iter().map(part).collect()
}
