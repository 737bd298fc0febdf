use burn::tensor::{DType, Device, Tensor};
use std::time::Instant;
use wan::guidance::*;
use wan::text::PromptEmbeds;
use wan::transformer::*;
use wan::weights::*;
#[test]
fn measure() {
    let config = TransformerConfig { patch_size: [1,2,2], num_attention_heads: 6, attention_head_dim: 32, in_channels: 16, out_channels: 16, text_dim: 128, freq_dim: 256, ffn_dim: 768, num_layers: 6, cross_attn_norm: true, qk_norm: Some("rms_norm_across_heads".into()), eps: 1e-6, image_dim: None, added_kv_proj_dim: None, rope_max_seq_len: 1024 };
    let model = WanTransformer::new(config, Weights::random(0, &Device::flex()), DType::F32).unwrap();
    let key = |p, n: usize| grpo::Key { seed: 1, iteration: 0, prompt: p, rollout: 0, purpose: grpo::Purpose::Data }.normals(n);
    for len in [12] {
    for (batch, side) in [(1, 8), (2, 8), (4, 8), (8, 8), (16, 8), (32, 8), (1, 16), (4, 16), (1, 32)] {
        let e = |p| Tensor::<1>::from_data(key(p, batch * len * 128).as_slice(), &Device::flex()).reshape([batch, len, 128]);
        let text = |p| PromptEmbeds { embeds: e(p), lengths: vec![len; batch], padded_length: 512 };
        let guided = GuidedText::new(&model, &text(1), Some(&text(2)), false);
        let x = wan::pipeline::initial_noise(&grpo::Key { seed: 1, iteration: 0, prompt: 0, rollout: 0, purpose: grpo::Purpose::Data }, [batch, 16, 5, side, side], &Device::flex());
        let samples: Vec<usize> = (0..batch).collect();
        let v = [GuidanceBatching::Together, GuidanceBatching::InTurn].map(|b| GuidedVelocity::new(&model, &guided, &samples, 4.5, b));
        let mut best = [f64::MAX; 2];
        for _ in 0..(400 / batch / (side / 8) / (side / 8)).clamp(6, 100) {
            for (i, v) in v.iter().enumerate() {
                let t = Instant::now();
                let _ = to_floats(v.velocity(x.clone(), &[500.0]));
                best[i] = best[i].min(t.elapsed().as_secs_f64() * 1e3);
            }
        }
        println!("text {len} batch {batch} tokens {}: together {:.1} in turn {:.1} ratio {:.3}", batch * 5 * side * side / 4, best[0], best[1], best[1] / best[0]);
    }
    }
}
