//! Embeddings of prompts on disk, addressed by what they are made of.
//!
//! ```text
//! DIR/KEY.safetensors   `embeds` [n, D], n the tokens of the prompt
//! KEY = SHA-256(format, fingerprint of the text encoder, token ids)
//! ```
//!
//! A prompt is encoded once, whatever runs use it; another encoder, or another text, is another key.

use crate::error::Result;
use crate::inputs::{fingerprint, hex};
use burn::tensor::{Device, Tensor, TensorData};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use wan::text::StagedTextEncoder;
use wan::weights::{WeightFiles, to_floats, write_safetensors};
use wan::{Error as WanError, Result as WanResult};

/// The embeddings of one encoder.
#[derive(Debug)]
pub struct EmbeddingCache {
    dir: PathBuf,
    fingerprint: [u8; 32],
    /// D
    features: usize,
}

/// Changes when the same encoder and ids would give other embeddings.
const FORMAT: &[u8] = b"flash-grpo embeddings 1";

impl EmbeddingCache {
    /// The cache in `dir`, which is created, for an encoder.
    ///
    /// # Errors
    /// The folder cannot be created, or the encoder's files cannot be read.
    pub fn open(dir: &Path, encoder: &StagedTextEncoder) -> Result<Self> {
        std::fs::create_dir_all(dir).map_err(|e| WanError::write(dir, e))?;
        let fingerprint = fingerprint(encoder.dir())?;
        Ok(Self { dir: dir.into(), fingerprint, features: encoder.config.d_model })
    }

    /// Embeddings [n, D] of token ids, on the CPU: those that are not there are made by `encode`, all at once, and kept. `encode` is not called if
    /// nothing is missing.
    ///
    /// # Errors
    /// Those of `encode`; an embedding cannot be written.
    pub fn get_or_encode(&self, ids: &[Vec<u32>], encode: impl FnOnce(&[Vec<u32>]) -> Result<Vec<Tensor<2>>>) -> Result<Vec<Tensor<2>>> {
        let distinct: BTreeSet<&Vec<u32>> = ids.iter().collect();
        let mut found: HashMap<&Vec<u32>, Tensor<2>> = HashMap::new();
        found.extend(distinct.iter().filter_map(|&ids| Some((ids, self.read(ids)?))));
        let absent: Vec<&Vec<u32>> = distinct.into_iter().filter(|ids| !found.contains_key(ids)).collect();
        if !absent.is_empty() {
            let made = encode(&absent.iter().map(|&ids| ids.clone()).collect::<Vec<_>>())?;
            for (ids, embeds) in absent.into_iter().zip(made) {
                self.write(ids, embeds.clone())?;
                found.insert(ids, embeds);
            }
        }
        Ok(ids.iter().map(|ids| found[ids].clone()).collect())
    }

    fn path(&self, ids: &[u32]) -> PathBuf {
        let mut hash = Sha256::new_with_prefix(FORMAT);
        hash.update(self.fingerprint);
        ids.iter().for_each(|id| hash.update(id.to_le_bytes()));
        self.dir.join(format!("{}.safetensors", hex(hash.finalize())))
    }

    /// What cannot be read, or has another shape, counts as absent: it is encoded again and replaced.
    fn read(&self, ids: &[u32]) -> Option<Tensor<2>> {
        let file = WeightFiles::open_file(&self.path(ids)).ok()?;
        let shape = [ids.len(), self.features];
        let values = file.floats("embeds").ok().filter(|_| file.shape("embeds").is_some_and(|got| got == shape))?;
        Some(Tensor::from_data(TensorData::new(values, shape), &Device::flex()))
    }

    fn write(&self, ids: &[u32], embeds: Tensor<2>) -> WanResult<()> {
        let shape = embeds.dims().to_vec();
        write_safetensors(&self.path(ids), &BTreeMap::from([("embeds".to_owned(), (shape, to_floats(embeds)))]), None)
    }
}
