//! What a run reads beside its recipe, as checksums: prompts, the pictures that they name, and the model. A run that is resumed with others under the
//! same names would end as neither.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use wan::Error as WanError;
use wan::clip::{IMAGE_ENCODER, IMAGE_PROCESSOR};
use wan::experts::SECOND;

use crate::error::{Error, Result};
use crate::settings::Prompt;

/// SHA-256 in hexadecimal by key of the recipe.
pub type Inputs = BTreeMap<String, String>;

/// Those of a model folder, of the prompts of training and of those of evaluation.
///
/// # Errors
/// A file that cannot be read.
pub fn of(model: &Path, [train, eval]: [&[Prompt]; 2]) -> Result<Inputs> {
    let parts = ["transformer", SECOND, "vae", "text_encoder", "tokenizer", IMAGE_ENCODER, IMAGE_PROCESSOR];
    let mut whole = Sha256::new();
    // where the second network takes over, and whether tokens have timesteps of their own
    let index = model.join("model_index.json");
    add_file(&mut whole, &index).map_err(|e| Error::from(WanError::read(&index, e)))?;
    for part in parts.map(|part| model.join(part)).into_iter().filter(|part| part.is_dir()) {
        whole.update(fingerprint(&part)?);
    }
    let entries = [("model.path", hex(whole.finalize())), ("prompts.eval", prompts(eval)?), ("prompts.train", prompts(train)?)];
    Ok(entries.map(|(key, sum)| (key.to_owned(), sum)).into())
}

/// Keys of what is not as it was; what was not summed then is not compared.
pub fn changed<'a>(before: &'a Inputs, now: &Inputs) -> Vec<&'a str> {
    before.iter().filter(|(key, sum)| now.get(*key).is_some_and(|now| now != *sum)).map(|(key, _)| key.as_str()).collect()
}

/// Texts and pictures, in order.
fn prompts(prompts: &[Prompt]) -> Result<String> {
    let mut hash = Sha256::new();
    for prompt in prompts {
        hash.update((prompt.text.len() as u64).to_le_bytes());
        hash.update(prompt.text.as_bytes());
        hash.update([u8::from(prompt.image.is_some())]);
        if let Some(metadata) = &prompt.metadata {
            hash.update(metadata.to_string());
        }
        if let Some(path) = &prompt.image {
            add_file(&mut hash, path).map_err(|e| Error::from(WanError::read(path, e)))?;
        }
    }
    Ok(hex(hash.finalize()))
}

/// Files up to this size are hashed whole.
const WHOLE: u64 = 1 << 26;
/// Of larger ones, so many pieces of so many bytes, evenly spread: training changes every weight, so any piece would do.
const PIECES: u64 = 256;
const PIECE: u64 = 1 << 16;

/// SHA-256 of configs and weights in a folder: names, sizes and contents, of large files a sample of them.
pub(crate) fn fingerprint(dir: &Path) -> wan::Result<[u8; 32]> {
    let read = |e| WanError::read(dir, e);
    let mut files: Vec<PathBuf> = std::fs::read_dir(dir).and_then(|entries| entries.map(|e| Ok(e?.path())).collect()).map_err(read)?;
    files.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors" || extension == "json"));
    files.sort();
    let mut hash = Sha256::new();
    for path in files {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        hash.update((name.len() as u64).to_le_bytes());
        hash.update(name.as_bytes());
        add_file(&mut hash, &path).map_err(|e| WanError::read(&path, e))?;
    }
    Ok(hash.finalize().into())
}

fn add_file(hash: &mut Sha256, path: &Path) -> std::io::Result<()> {
    let mut file = File::open(path)?;
    let size = file.metadata()?.len();
    hash.update(size.to_le_bytes());
    if size <= WHOLE {
        return std::io::copy(&mut file, hash).map(drop);
    }
    for i in 0..PIECES {
        file.seek(SeekFrom::Start(i * (size - PIECE) / (PIECES - 1)))?;
        std::io::copy(&mut (&mut file).take(PIECE), hash)?;
    }
    Ok(())
}

pub(crate) fn hex(digest: impl AsRef<[u8]>) -> String {
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}
