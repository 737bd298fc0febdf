//! A batch of encoded prompts.
//!
//! Legend: `B` prompts, `L` tokens of the longest, `D` features.

use crate::layers::cast;
use burn::tensor::{DType, Device, Int, Tensor};

/// Embeddings of prompts, without the padding the reference carries along.
///
/// Wan was trained with prompts zero-padded to 512 rows that cross-attention does see. All padding rows are equal, so
/// only their number matters: this type stores the real rows and `padded_length`, the transformer accounts for the rest.
#[derive(Debug, Clone)]
pub struct PromptEmbeds {
    /// [B, L, D]; the rows of prompt `b` from `lengths[b]` on are zero.
    pub embeds: Tensor<3>,
    /// Tokens of each prompt, `[B]`; the largest is `L` (but `L` is never below 1).
    pub lengths: Vec<usize>,
    /// Rows the prompt stands for: zero rows from `L` up to here take part in cross-attention.
    pub padded_length: usize,
}

impl PromptEmbeds {
    /// From padded embeddings [B, padded_length, D]: what follows the last row that is not zero is padding.
    pub fn from_padded(padded: Tensor<3>) -> Self {
        let [batch, padded_length, _] = padded.dims();
        let lengths = row_is_used(&padded)
            .chunks_exact(padded_length)
            .map(|rows| rows.iter().rposition(|&used| used).map_or(0, |last| last + 1))
            .collect::<Vec<_>>();
        assert_eq!(lengths.len(), batch, "one length per prompt");
        Self { embeds: cut(padded, &lengths), lengths, padded_length }
    }

    /// From the embeddings of each prompt, [n, D] each.
    ///
    /// # Panics
    /// If there is no prompt, or they have different features.
    pub fn from_rows(prompts: Vec<Tensor<2>>, padded_length: usize) -> Self {
        assert!(!prompts.is_empty(), "an empty list is not a batch");
        let lengths: Vec<usize> = prompts.iter().map(|prompt| prompt.dims()[0]).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0).max(1);
        let rows = prompts.into_iter().map(|prompt| pad(prompt.unsqueeze(), longest)).collect();
        Self { embeds: Tensor::cat(rows, 0), lengths, padded_length }
    }

    /// The embeddings of each prompt, [n, D] each.
    pub fn into_rows(self) -> Vec<Tensor<2>> {
        let row = |(prompt, &length): (usize, &usize)| self.embeds.clone().slice([prompt..prompt + 1, 0..length.max(1)]).squeeze_dim(0);
        self.lengths.iter().enumerate().map(row).collect()
    }

    /// The embeddings with their padding, [B, padded_length, D].
    pub fn to_padded(&self) -> Tensor<3> {
        pad(self.embeds.clone(), self.padded_length)
    }

    /// The prompts of the given indices, in that order; an index may repeat.
    ///
    /// # Panics
    /// If an index is not below the batch size, or there is none.
    pub fn select(&self, indices: &[usize]) -> Self {
        let kept = self.select_uncut(indices);
        Self { embeds: cut(kept.embeds, &kept.lengths), ..kept }
    }

    /// The same with all `L` rows, so that what is computed of a prompt does not depend, to the last bit, on which others there are.
    ///
    /// # Panics
    /// As [`select`](Self::select).
    pub fn select_uncut(&self, indices: &[usize]) -> Self {
        assert!(!indices.is_empty(), "an empty selection is not a batch");
        let rows: Vec<i32> = indices.iter().map(|&i| i as i32).collect();
        let rows = Tensor::<1, Int>::from_ints(rows.as_slice(), &self.embeds.device());
        let lengths = indices.iter().map(|&i| self.lengths[i]).collect();
        Self { embeds: self.embeds.clone().select(0, rows), lengths, padded_length: self.padded_length }
    }

    /// The prompts of `first`, then those of `second`.
    ///
    /// # Panics
    /// If they are padded to different lengths or have different features.
    pub fn cat(first: &Self, second: &Self) -> Self {
        assert_eq!(first.padded_length, second.padded_length, "prompts of different padding");
        let length = first.embeds.dims()[1].max(second.embeds.dims()[1]);
        let embeds = Tensor::cat(vec![pad(first.embeds.clone(), length), pad(second.embeds.clone(), length)], 0);
        let lengths = [first.lengths.as_slice(), &second.lengths].concat();
        Self { embeds, lengths, padded_length: first.padded_length }
    }

    /// Number of prompts.
    pub fn batch_size(&self) -> usize {
        self.lengths.len()
    }

    /// The same values on another device.
    pub fn to_device(&self, device: &Device) -> Self {
        Self { embeds: self.embeds.clone().to_device(device), ..self.clone() }
    }
}

/// For each row of x [B, L, D], whether it has an element other than zero; [B * L].
fn row_is_used(x: &Tensor<3>) -> Vec<bool> {
    let largest = cast(x.clone().inner().abs().max_dim(2), DType::F32).into_data();
    largest.iter::<f32>().map(|value| value != 0.0).collect()
}

/// Cuts x [B, L, D] to the longest of `lengths`, but to no less than one row.
fn cut(x: Tensor<3>, lengths: &[usize]) -> Tensor<3> {
    let longest = lengths.iter().copied().max().unwrap_or(0).max(1);
    if x.dims()[1] == longest { x } else { x.slice_dim(1, 0..longest) }
}

/// Appends zero rows to x [B, L, D] up to `length`.
fn pad(x: Tensor<3>, length: usize) -> Tensor<3> {
    let [batch, rows, features] = x.dims();
    if rows >= length {
        return x;
    }
    let zeros = Tensor::zeros([batch, length - rows, features], (&x.device(), x.dtype()));
    Tensor::cat(vec![x, zeros], 1)
}
