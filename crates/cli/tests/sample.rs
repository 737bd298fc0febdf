//! `flash-grpo sample` as a user calls it: its files, and its messages for bad input.

#[path = "../../wan/tests/common/experts.rs"]
mod experts;

use assert_cmd::Command;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use wan::weights::{WeightFiles, write_safetensors};

fn golden_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden")
}

/// `flash-grpo sample` in the golden folder, for 9 frames of 32x48 from wan-tiny in 2 steps.
fn sample(output: &Path) -> Command {
    sample_of(Path::new("wan-tiny"), output)
}

fn sample_of(model: &Path, output: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flash-grpo"));
    command.current_dir(golden_dir()).arg("sample").arg("--model").arg(model).arg("--output").arg(output);
    command.args(["--height", "32", "--width", "48", "--num-frames", "9"]);
    command
}

/// Standard error of a call that must fail with exit code 2, without a panic.
#[track_caller]
fn refused(command: &mut Command) -> String {
    let output = command.output().expect("the program runs");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(output.stdout.is_empty());
    String::from_utf8(output.stderr).expect("UTF-8")
}

/// max|a-b| / max|b| of a tensor of `file` and one of the golden pipeline.
fn error(file: &Path, name: &str, golden_name: &str) -> f32 {
    let golden = WeightFiles::open_file(&golden_dir().join("pipeline.safetensors")).expect("golden file");
    let ours = WeightFiles::open_file(file).expect("our file");
    assert_eq!(ours.shape(name), golden.shape(golden_name));
    let (a, b) = (ours.floats(name).expect(name), golden.floats(golden_name).expect(golden_name));
    let largest = b.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
    a.iter().zip(&b).fold(0.0_f32, |m, (a, b)| m.max((a - b).abs())) / largest
}

#[test]
fn matches_reference_pipeline_through_files() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let path = |name: &str| dir.path().join(name);
    let golden = WeightFiles::open_file(&golden_dir().join("pipeline.safetensors")).expect("golden file");
    let start = (golden.shape("latents_initial").expect("shape"), golden.floats("latents_initial").expect("floats"));
    write_safetensors(&path("start.safetensors"), &BTreeMap::from([("latents".to_owned(), start)]), None).expect("write");

    let mut command = sample(&path("fox.mp4"));
    command.args(["--prompt", "A red fox runs across a snowy field at sunrise."]);
    command.args(["--negative-prompt", "low quality, blurred details, static"]);
    command.args(["--num-inference-steps", "8", "--guidance-scale", "4.5"]);
    command.arg("--init-latents").arg(path("start.safetensors"));
    command.arg("--save-latents").arg(path("latents.safetensors"));
    command.arg("--save-frames").arg(path("frames.safetensors"));
    let output = command.output().expect("the program runs");
    assert!(output.status.success(), "{output:?}");
    assert!(output.stderr.is_empty(), "no progress bar where there is no terminal: {output:?}");
    let told = String::from_utf8(output.stdout).expect("UTF-8");
    assert_eq!(told, format!("wrote {} (9 frames of 48x32)\n", path("fox.mp4").display()));

    assert!(error(&path("latents.safetensors"), "latents", "latents_final") < 5e-5);
    assert!(error(&path("frames.safetensors"), "frames", "frames_np") < 5e-5);
    let video = std::fs::read(path("fox.mp4")).expect("video");
    assert_eq!(&video[4..8], b"ftyp");
}

#[test]
fn adapters_and_choices_take_part() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let run = |name: &str, options: &[&str]| {
        let (video, latents) = (dir.path().join(name), dir.path().join(format!("{name}.safetensors")));
        let mut command = sample(&video);
        command.args(["--prompt", "snow", "--num-inference-steps", "2"]).arg("--save-latents").arg(&latents).args(options);
        command.assert().success();
        assert!(video.exists());
        WeightFiles::open_file(&latents).expect("latents").floats("latents").expect("floats")
    };
    let base = run("base.gif", &[]);
    assert_eq!(base, run("again.gif", &["--seed", "0"]));
    assert_ne!(base, run("seed.gif", &["--seed", "1"]));
    assert_ne!(base, run("euler.gif", &["--solver", "euler"]));
    assert_ne!(base, run("grid.gif", &["--grid", "unipc"]));
    let adapted = run("peft.gif", &["--lora", "lora/peft"]);
    assert_ne!(base, adapted);
    // the same adapter in another layout
    let other = run("comfyui.gif", &["--lora", "lora/comfyui_diffusion_model_alpha.safetensors"]);
    let difference = adapted.iter().zip(&other).fold(0.0_f32, |m, (a, b)| m.max((a - b).abs()));
    assert!(difference < 1e-5, "{difference}");
    let rounded = run("bf16.gif", &["--mixed-precision", "bf16"]);
    let difference = base.iter().zip(&rounded).fold(0.0_f32, |m, (a, b)| m.max((a - b).abs()));
    assert!(difference > 1e-4 && difference < 0.5, "{difference} of values up to 6");
}

#[test]
fn bad_input_gets_one_clear_message() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let output = dir.path().join("out.gif");
    let with = |options: &[&str]| refused(sample(&output).args(["--prompt", "snow"]).args(options));
    assert_eq!(
        with(&["--guidance-scale", "0.5"]),
        "error: guidance_scale is `0.5`: it must be a number from 1 up\nhint: 1 is no guidance; Wan is usually sampled with 5\n"
    );
    assert_eq!(
        with(&["--num-inference-steps", "0"]),
        "error: num_inference_steps is `0`: expected 1 to 1000\nhint: 20 for training and 50 for evaluation are the published values\n"
    );
    assert_eq!(
        with(&["--lora", "nowhere"]),
        "error: cannot read `nowhere`: No such file or directory (os error 2)\nhint: check the path; a model folder has the diffusers layout (model_index.json, transformer/, vae/, text_encoder/, tokenizer/, scheduler/)\n"
    );
    assert_eq!(with(&["--fps", "0"]), "error: fps is `0`: it must be above 0 and at most 1000\nhint: Wan videos play at 16\n");
    assert!(with(&["--init-latents", "pipeline.safetensors"]).starts_with("error: `pipeline.safetensors`: no tensor `latents`\nhint: "));
    assert!(with(&["--solver", "heun"]).contains("[possible values: unipc, euler]"));

    let missing = refused(sample(&output).args(["--prompt", "snow", "--model", "wan-tiny/vae"]));
    assert!(missing.contains("the argument '--model <DIR>' cannot be used multiple times"), "{missing}");
    assert_eq!(
        refused(sample(&output).args(["--prompt", "a\u{7}b"])),
        "error: prompt is `a\\u{7}b`: character 2 is the control character U+0007\nhint: remove it; was the text copied from a terminal or a binary file?\n"
    );
    assert!(!output.exists());
}

#[test]
fn requests_and_adapters_are_checked_before_weights_are_read() {
    let model = tempfile::tempdir().expect("temporary folder");
    experts::copy(&golden_dir().join("wan-tiny"), model.path());
    for part in ["transformer", "vae"] {
        std::fs::write(model.path().join(part).join("diffusion_pytorch_model.safetensors"), [7_u8; 64]).expect("write");
    }
    let output = model.path().join("out.gif");
    let with = |options: &[&str]| refused(sample_of(model.path(), &output).args(["--prompt", "snow"]).args(options));
    assert!(with(&[]).contains("not a valid safetensors file"), "{}", with(&[]));
    for (options, message) in [
        (&["--max-sequence-length", "0"][..], "max_sequence_length is `0`"),
        (&["--guidance-scale-2", "3"], "guidance_scale_2 is `3`"),
        (&["--shift", "0"], "shift is `0`"),
        (&["--image", "../crates/video/tests/fixtures/picture.png"], "image is `given`"),
        (&["--lora", "nowhere"], "cannot read `nowhere`"),
        (&["--lora", "lora/peft", "--lora-2", "lora/peft"], "the adapter is for a second transformer"),
        (&["--lora", "pipeline.safetensors"], "belongs to no known LoRA layout"),
    ] {
        let told = with(options);
        assert!(told.contains(message) && told.contains("hint: "), "{options:?}: {told}");
    }
}

#[test]
fn outputs_are_checked_before_the_work() {
    let refuse = |output: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flash-grpo"));
        refused(command.args(["sample", "--model", "no-such-model", "--prompt", "snow", "--output", output]))
    };
    assert_eq!(refuse("out.avi"), "error: cannot tell the video format of `out.avi`\nhint: name the file `.mp4` or `.gif`\n");
    assert_eq!(
        refuse("no-such-folder/out.mp4"),
        "error: cannot write `no-such-folder/out.mp4`: there is no folder `no-such-folder`\nhint: create it first\n"
    );
    assert!(refuse("out.mp4").starts_with("error: cannot read `no-such-model`: "));
}

/// From a file to what the reference makes of it: Wan2.1 image-to-video in small. The encoder's image is rounded elsewhere than in the reference.
#[test]
fn a_video_starts_with_a_picture() {
    let model = experts::image_to_video_with_encoder(&golden_dir());
    let dir = tempfile::tempdir().expect("temporary folder");
    let path = |name: &str| dir.path().join(name);
    let golden = WeightFiles::open_file(&golden_dir().join("pipeline.safetensors")).expect("golden file");
    let start = (golden.shape("latents_initial").expect("shape"), golden.floats("latents_initial").expect("floats"));
    write_safetensors(&path("start.safetensors"), &BTreeMap::from([("latents".to_owned(), start)]), None).expect("write");
    let from_picture = |picture: &Path| {
        let mut command = sample_of(model.path(), &path("fox.mp4"));
        command.arg("--image").arg(picture).args(["--num-inference-steps", "8", "--guidance-scale", "4.5"]);
        command.args([
            "--prompt",
            "A red fox runs across a snowy field at sunrise.",
            "--negative-prompt",
            "low quality, blurred details, static",
        ]);
        command.arg("--init-latents").arg(path("start.safetensors")).arg("--save-latents").arg(path("latents.safetensors"));
        command
    };
    let output = from_picture(&golden_dir().join("../crates/video/tests/fixtures/picture.png")).output().expect("the program runs");
    assert!(output.status.success(), "{output:?}");
    let reference = WeightFiles::open_file(&golden_dir().join("i2v21_pipeline.safetensors")).expect("golden file");
    let (ours, steps) =
        (WeightFiles::open_file(&path("latents.safetensors")).expect("our file"), reference.floats("latents_after_step").expect("steps"));
    let ours = ours.floats("latents").expect("latents");
    let last = &steps[7 * ours.len()..];
    let largest = last.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
    let error = ours.iter().zip(last).fold(0.0_f32, |m, (a, b)| m.max((a - b).abs())) / largest;
    assert!(error < 5e-3, "{error:e}");
    let absent = refused(&mut from_picture(Path::new("absent.png")));
    assert!(absent.contains("absent.png") && absent.contains("hint:"), "{absent}");
    let none = refused(sample_of(model.path(), &path("fox.mp4")).args(["--prompt", "a fox"]));
    assert!(none.contains("image is `absent`") && none.contains("first frame"), "{none}");
}
