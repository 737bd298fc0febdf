//! Files are read back with other readers than the writers' own code.

#![allow(clippy::print_stderr)] // The measured numbers, for `--nocapture`.

use std::{fs, path::PathBuf};

use rust_h264::{decoder::OrderedDecoder, nal::parse_annex_b};
use tempfile::TempDir;
use video::{Frames, VideoError, write, write_png_grid};

/// A clip of a soft bright disc that moves right over a dark ground.
fn moving_disc(num_frames: usize, height: usize, width: usize) -> Frames {
    let mut data = Vec::new();
    for index in 0..num_frames {
        let center = width as f32 * (0.3 + 0.4 * index as f32 / num_frames as f32);
        for y in 0..height {
            for x in 0..width {
                let distance = (x as f32 - center).hypot(y as f32 - height as f32 / 2.0);
                let share = (height as f32 / 4.0 - distance).clamp(0.0, 1.0);
                data.extend([0.12 + 0.78 * share, 0.12, 0.12 + 0.2 * share]);
            }
        }
    }
    Frames::new(num_frames, height, width, data).expect("sizes agree")
}

fn target(name: &str) -> (TempDir, PathBuf) {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join(name);
    (folder, path)
}

/// The payload of the first box of `kind`, wherever it is.
fn find_box<'a>(bytes: &'a [u8], kind: &[u8; 4]) -> &'a [u8] {
    let at = bytes.windows(4).position(|window| window == kind).expect("the box exists");
    let size = u32::from_be_bytes(bytes[at - 4..at].try_into().expect("4 bytes")) as usize;
    &bytes[at + 4..at - 4 + size]
}

/// The parameter sets and then the samples of an MP4 with one H.264 track, as units with start codes.
fn units(bytes: &[u8]) -> Vec<Vec<u8>> {
    let unit = |payload: &[u8]| [&[0, 0, 0, 1], payload].concat();
    let config = find_box(bytes, b"avcC");
    let sps_len = usize::from(u16::from_be_bytes([config[6], config[7]]));
    let pps = &config[8 + sps_len + 1..];
    let pps_len = usize::from(u16::from_be_bytes([pps[0], pps[1]]));
    let mut units = vec![unit(&config[8..8 + sps_len]), unit(&pps[2..2 + pps_len])];
    let mut data = find_box(bytes, b"mdat");
    while let Some((len, rest)) = data.split_first_chunk::<4>() {
        let (payload, rest) = rest.split_at(u32::from_be_bytes(*len) as usize);
        units.push(unit(payload));
        data = rest;
    }
    units
}

/// Decodes an MP4 to frames, by the inverse of BT.709 limited range.
fn decode(bytes: &[u8]) -> Vec<Frames> {
    let mut decoder: OrderedDecoder = OrderedDecoder::new();
    let units = units(bytes).concat();
    let mut pictures: Vec<_> = parse_annex_b(&units).iter().flat_map(|unit| decoder.decode_nal(unit).expect("a valid stream")).collect();
    pictures.extend(decoder.flush());
    pictures.iter().map(rgb).collect()
}

fn rgb(yuv: &rust_h264::decoder::Frame) -> Frames {
    let (width, height) = (yuv.width as usize, yuv.height as usize);
    let mut data = Vec::new();
    for (y, x) in (0..height).flat_map(|y| (0..width).map(move |x| (y, x))) {
        let chroma = y / 2 * (width / 2) + x / 2;
        let luma = (f32::from(yuv.y[y * width + x]) - 16.0) / 219.0;
        let (cb, cr) = ((f32::from(yuv.u[chroma]) - 128.0) / 224.0, (f32::from(yuv.v[chroma]) - 128.0) / 224.0);
        data.extend([luma + 1.5748 * cr, luma - 0.1873 * cb - 0.4681 * cr, luma + 1.8556 * cb]);
    }
    Frames::new(1, height, width, data).expect("sizes agree")
}

/// Peak signal-to-noise ratio over the pixels that both have, in dB.
fn psnr(frames: &Frames, decoded: &[Frames]) -> f64 {
    let (mut sum, mut count) = (0.0, 0.0);
    for (index, other) in decoded.iter().enumerate() {
        for (y, x) in (0..frames.height()).flat_map(|y| (0..frames.width()).map(move |x| (y, x))) {
            for (a, b) in frames.pixel(index, y, x).into_iter().zip(other.pixel(0, y, x)) {
                sum += f64::from(a - b).powi(2);
                count += 1.0;
            }
        }
    }
    -10.0 * (sum / count).log10()
}

#[test]
fn mp4_decodes_back() {
    for (num_frames, height, width) in [(9, 64, 64), (17, 120, 208), (5, 33, 47), (1, 64, 64), (3, 16, 6)] {
        let (_folder, path) = target("clip.mp4");
        let frames = moving_disc(num_frames, height, width);
        write(&path, &frames, 16.0).expect("written");
        let bytes = fs::read(&path).expect("the file exists");
        let decoded = decode(&bytes);
        let psnr = psnr(&frames, &decoded);
        eprintln!("{num_frames}x{height}x{width}: {psnr:.1} dB, {} bytes", bytes.len());
        assert_eq!(decoded.len(), num_frames);
        assert!(decoded[0].height() - height < 16 && decoded[0].width() - width < 16);
        // Most of the loss is that of halved chroma at the outline, which is all there is to a tiny clip.
        assert!(psnr > if width < 16 { 20.0 } else { 30.0 }, "{psnr} dB");
    }
}

#[test]
fn mp4_is_a_function_of_the_frames() {
    let (_folder, path) = target("clip.mp4");
    let frames = moving_disc(5, 64, 64);
    write(&path, &frames, 8.0).expect("written");
    let first = fs::read(&path).expect("the file exists");
    write(&path, &frames, 8.0).expect("overwritten");
    assert_eq!(first, fs::read(&path).expect("the file exists"));
}

#[test]
fn gif_decodes_back() {
    let (_folder, path) = target("clip.GIF");
    let frames = moving_disc(9, 48, 64);
    write(&path, &frames, 16.0).expect("written");
    let mut options = gif::DecodeOptions::new();
    options.set_color_output(gif::ColorOutput::RGBA);
    let mut decoder = options.read_info(fs::File::open(&path).expect("the file exists")).expect("a GIF");
    let (mut count, mut delays) = (0, 0);
    while let Some(frame) = decoder.read_next_frame().expect("a valid GIF") {
        assert_eq!((frame.width, frame.height), (64, 48));
        for (index, pixel) in frame.buffer.as_chunks::<4>().0.iter().enumerate() {
            let expected = frames.pixel(count, index / 64, index % 64).map(|value| value * 255.0);
            assert!(expected.iter().zip(pixel).all(|(a, &b)| (a - f32::from(b)).abs() < 12.0));
        }
        count += 1;
        delays += frame.delay;
    }
    assert_eq!((count, delays), (9, 56));
}

#[test]
fn png_grid_has_a_strip_for_each_clip() {
    let (_folder, path) = target("sheet.png");
    let (a, b, c) = (moving_disc(3, 16, 20), moving_disc(2, 10, 12), moving_disc(1, 16, 16));
    write_png_grid(&path, &[&a, &b, &c], 2).expect("written");
    let file = std::io::BufReader::new(fs::File::open(&path).expect("the file exists"));
    let mut reader = png::Decoder::new(file).read_info().expect("a PNG");
    let mut pixels = vec![0; reader.output_buffer_size().expect("a size")];
    let info = reader.next_frame(&mut pixels).expect("a valid PNG");
    assert_eq!((info.width, info.height), (2 * (3 * 22 - 2 + 8) + 8, 2 * (16 + 8) + 8));
    let second_frame = (8 * info.width as usize + 8 + 22) * 3;
    assert_eq!(pixels[second_frame], (0.12f32 * 255.0).round() as u8);
    assert!(write_png_grid(&path, &[], 2).is_err() && write_png_grid(&path, &[&a], 0).is_err());
}

/// Clips of real size: 81 frames of 832 pixels in a row would be wider than a PNG can be.
#[test]
fn sheets_of_large_clips_show_some_frames_smaller() {
    let size = |path: &std::path::Path| {
        let file = std::io::BufReader::new(fs::File::open(path).expect("the file exists"));
        let mut reader = png::Decoder::new(file).read_info().expect("a PNG");
        let mut pixels = vec![0; reader.output_buffer_size().expect("a size")];
        let info = reader.next_frame(&mut pixels).expect("a valid PNG");
        ([info.width as usize, info.height as usize], pixels)
    };
    let (_folder, path) = target("sheet.png");
    // a frame is as bright as its place, so that the shown ones can be told
    let long = |frames: usize, height: usize, width: usize| {
        let data = (0..frames).flat_map(|frame| vec![frame as f32 / 255.0; height * width * 3]).collect();
        Frames::new(frames, height, width, data).expect("sizes agree")
    };
    let clip = long(81, 24, 832);
    write_png_grid(&path, &[&clip; 8], 1).expect("written");
    let ([width, height], pixels) = size(&path);
    assert_eq!([width, height], [8 * (416 + 2) - 2 + 16, 8 * (12 + 8) + 8]);
    let at = |frame: usize| pixels[(8 * width + 8 + frame * 418) * 3];
    assert_eq!((0..8).map(at).collect::<Vec<_>>(), [0, 11, 22, 34, 45, 57, 68, 80]);
    write_png_grid(&path, &[&long(121, 8, 1280)], 1).expect("written");
    assert_eq!(size(&path).0[0], 8 * (427 + 2) - 2 + 16);
    assert!(write_png_grid(&path, &[&long(1, 1, 1); 2000], 1).is_err(), "2000 rows of 9 pixels");
}

#[test]
fn bad_requests_leave_nothing_behind() {
    let (folder, path) = target("clip.avi");
    let frames = moving_disc(1, 16, 16);
    let message = |result: Result<(), VideoError>| result.expect_err("refused").to_string();
    assert!(message(write(&path, &frames, 8.0)).ends_with("hint: name the file `.mp4` or `.gif`"));
    for fps in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let message = message(write(path.with_extension("mp4"), &frames, fps));
        assert!(message.starts_with("`fps` must be above 0"), "{message}");
    }
    let missing = folder.path().join("missing/clip.mp4");
    assert_eq!(message(write(&missing, &frames, 8.0)), format!("cannot write `{}`", missing.display()));
    let wide = Frames::new(1, 1, 4000, vec![0.0; 12_000]).expect("sizes agree");
    assert!(message(write(path.with_extension("mp4"), &wide, 8.0)).contains("got 4000x1"));
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0);
}

#[test]
fn values_outside_the_range_are_clamped() {
    let (_folder, path) = target("clip.mp4");
    let data = [f32::NAN, -3.0, 7.0].repeat(16 * 16);
    write(&path, &Frames::new(1, 16, 16, data).expect("sizes agree"), 8.0).expect("written");
    let [r, g, b] = decode(&fs::read(&path).expect("the file exists"))[0].pixel(0, 8, 8);
    assert!(r.abs() < 0.02 && g.abs() < 0.02 && (b - 1.0).abs() < 0.02, "{r} {g} {b}");
}

#[cfg(unix)]
#[test]
fn files_are_readable_by_others_as_the_umask_allows() {
    use std::os::unix::fs::PermissionsExt;
    let (folder, path) = target("clip.gif");
    write(&path, &moving_disc(1, 16, 16), 8.0).expect("written");
    let plain = folder.path().join("plain");
    fs::write(&plain, "").expect("written");
    let mode = |path| fs::metadata(path).expect("the file exists").permissions().mode();
    assert_eq!(mode(&path), mode(&plain));
}
