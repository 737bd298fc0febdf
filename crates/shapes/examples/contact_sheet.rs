//! Draws a contact sheet of captions and prints their scores: `cargo run --release -p shapes --example contact_sheet -- sheet.png`.
#![allow(clippy::print_stdout)]

use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};
use shapes::{RenderOptions, all_captions, render, score};
use video::Frames;

fn main() -> Result<(), video::VideoError> {
    let path = std::env::args().nth(1).unwrap_or_else(|| "contact_sheet.png".to_owned());
    // A stride coprime to the number of motions and shapes shows every attribute.
    let captions: Vec<_> = all_captions().into_iter().step_by(5).collect();
    let mut clips: Vec<Frames> = Vec::new();
    for (seed, caption) in captions.iter().enumerate() {
        let clip = render(caption, &mut ChaCha8Rng::seed_from_u64(seed as u64), &RenderOptions::default());
        println!("{:32} {:?}", caption.to_string(), score(&clip, caption));
        clips.push(clip);
    }
    video::write_png_grid(&path, &clips.iter().collect::<Vec<_>>(), 1)?;
    println!("wrote {path}");
    Ok(())
}
