//! The names of the original Wan release, which ComfyUI, musubi and most adapters keep, and those of diffusers, which this crate uses.
//!
//! ```text
//! diffusers   blocks.0.attn1.to_q    blocks.0.norm2   proj_out
//! original    blocks.0.self_attn.q   blocks.0.norm3   head.head
//! ```
//!
//! The layer norms are numbered differently: the one in front of the cross-attention, which alone has weights, is `norm3` there and `norm2`
//! here. Shapes are the same.

use crate::error::Result;
use crate::weights::WeightFiles;

/// What single files put in front of every name.
const PREFIXES: [&str; 2] = ["model.diffusion_model.", "diffusion_model."];

/// [diffusers, original], outside the blocks.
const ENDS: [[&str; 2]; 13] = [
    ["patch_embedding", "patch_embedding"],
    ["condition_embedder.time_embedder.linear_1", "time_embedding.0"],
    ["condition_embedder.time_embedder.linear_2", "time_embedding.2"],
    ["condition_embedder.time_proj", "time_projection.1"],
    ["condition_embedder.text_embedder.linear_1", "text_embedding.0"],
    ["condition_embedder.text_embedder.linear_2", "text_embedding.2"],
    ["condition_embedder.image_embedder.norm1", "img_emb.proj.0"],
    ["condition_embedder.image_embedder.ff.net.0.proj", "img_emb.proj.1"],
    ["condition_embedder.image_embedder.ff.net.2", "img_emb.proj.3"],
    ["condition_embedder.image_embedder.norm2", "img_emb.proj.4"],
    ["condition_embedder.image_embedder.pos_embed", "img_emb.emb_pos"],
    ["scale_shift_table", "head.modulation"],
    ["proj_out", "head.head"],
];

/// [diffusers, original], after `blocks.N.`.
const BLOCK: [[&str; 2]; 19] = [
    ["scale_shift_table", "modulation"],
    ["norm2", "norm3"],
    ["attn1.to_q", "self_attn.q"],
    ["attn1.to_k", "self_attn.k"],
    ["attn1.to_v", "self_attn.v"],
    ["attn1.to_out.0", "self_attn.o"],
    ["attn1.norm_q", "self_attn.norm_q"],
    ["attn1.norm_k", "self_attn.norm_k"],
    ["attn2.to_q", "cross_attn.q"],
    ["attn2.to_k", "cross_attn.k"],
    ["attn2.to_v", "cross_attn.v"],
    ["attn2.to_out.0", "cross_attn.o"],
    ["attn2.norm_q", "cross_attn.norm_q"],
    ["attn2.norm_k", "cross_attn.norm_k"],
    ["attn2.add_k_proj", "cross_attn.k_img"],
    ["attn2.add_v_proj", "cross_attn.v_img"],
    ["attn2.norm_added_k", "cross_attn.norm_k_img"],
    ["ffn.net.0.proj", "ffn.0"],
    ["ffn.net.2", "ffn.2"],
];

/// The original name of a layer or tensor of the transformer; none if it has no such.
pub fn original_name(diffusers: &str) -> Option<String> {
    translated(diffusers, [0, 1])
}

/// The diffusers name of a layer or tensor of the original release, with or without the prefix of single files.
pub fn diffusers_name(original: &str) -> Option<String> {
    translated(without_prefix(original), [1, 0])
}

fn without_prefix(name: &str) -> &str {
    PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name)
}

/// `name` with its stem, a whole number of parts between dots, in the other column.
fn translated(name: &str, [from, to]: [usize; 2]) -> Option<String> {
    let (block, rest, table): (&str, &str, &[[&str; 2]]) = match split_block(name) {
        Some((block, rest)) => (block, rest, &BLOCK),
        None => ("", name, &ENDS),
    };
    table.iter().find_map(|row| {
        let end = rest.strip_prefix(row[from])?;
        (end.is_empty() || end.starts_with('.')).then(|| format!("{block}{}{end}", row[to]))
    })
}

/// `blocks.3.attn1.to_q` -> (`blocks.3.`, `attn1.to_q`)
fn split_block(name: &str) -> Option<(&str, &str)> {
    let number = name.strip_prefix("blocks.")?.find('.')?;
    Some(name.split_at("blocks.".len() + number + 1))
}

/// The tensors of a transformer under their diffusers names, whichever they have in the files. A name that neither knows is kept, to be
/// reported with those that do not fit.
///
/// # Errors
/// Two tensors that get one name.
pub fn under_diffusers_names(files: WeightFiles) -> Result<WeightFiles> {
    let is_original = files.names().any(|name| without_prefix(name) == "head.modulation");
    if is_original { files.renamed(|name| diffusers_name(name).unwrap_or_else(|| name.to_owned())) } else { Ok(files) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};
    use std::path::Path;

    #[test]
    fn names_are_those_of_the_release() {
        for (diffusers, original) in [
            ("blocks.0.norm2.weight", "blocks.0.norm3.weight"),
            ("blocks.12.scale_shift_table", "blocks.12.modulation"),
            ("scale_shift_table", "head.modulation"),
            ("blocks.7.attn2.to_out.0.bias", "blocks.7.cross_attn.o.bias"),
            ("blocks.7.attn1.norm_k.weight", "blocks.7.self_attn.norm_k.weight"),
            ("blocks.3.ffn.net.0.proj.weight", "blocks.3.ffn.0.weight"),
            ("condition_embedder.time_proj.bias", "time_projection.1.bias"),
            ("condition_embedder.text_embedder.linear_2.weight", "text_embedding.2.weight"),
            ("proj_out.weight", "head.head.weight"),
            ("patch_embedding.weight", "patch_embedding.weight"),
        ] {
            assert_eq!(original_name(diffusers).as_deref(), Some(original));
            for prefix in ["", "diffusion_model.", "model.diffusion_model."] {
                assert_eq!(diffusers_name(&format!("{prefix}{original}")).as_deref(), Some(diffusers));
            }
        }
        for unknown in ["blocks.0.norm1.weight", "blocks.0", "head.headless", "", "blocks..x"] {
            assert_eq!((original_name(unknown), diffusers_name(unknown)), (None, None), "{unknown}");
        }
    }

    #[test]
    fn every_tensor_of_the_released_models_has_both_names() {
        for model in ["wan2.1-t2v-1.3b", "wan2.1-t2v-14b"] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../golden/real/{model}.transformer.shapes.json"));
            let shapes: BTreeMap<String, Vec<usize>> =
                serde_json::from_str(&std::fs::read_to_string(path).expect("readable")).expect("names and shapes");
            let originals: BTreeSet<String> = shapes.keys().map(|name| original_name(name).expect("a name")).collect();
            assert_eq!(originals.len(), shapes.len(), "no two have one name");
            let back: BTreeSet<String> = originals.iter().map(|name| diffusers_name(name).expect("a name")).collect();
            assert!(back.iter().eq(shapes.keys()));
        }
    }
}
