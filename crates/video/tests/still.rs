//! Pictures from files, against Pillow (fixtures/make_images.py).

use std::path::{Path, PathBuf};

use video::{Picture, VideoError};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn bytes(name: &str, height: usize, width: usize) -> Vec<i32> {
    let frame = Picture::read(fixture(name)).expect("a picture").stretched(height, width);
    assert_eq!((frame.num_frames(), frame.height(), frame.width()), (1, height, width));
    frame.data().iter().map(|value| (value * 255.0).round() as i32).collect()
}

/// JPEG decoders round differently.
#[test]
fn resizes_as_pillow_does() {
    for (name, resized, allowed) in
        [("picture.png", "picture_png_24x16.png", 1), ("grey.png", "grey_png_24x16.png", 1), ("picture.jpg", "picture_jpg_24x16.png", 4)]
    {
        let (ours, pillows) = (bytes(name, 16, 24), bytes(resized, 16, 24));
        let worst = ours.iter().zip(&pillows).map(|(a, b)| (a - b).abs()).max();
        assert!(worst <= Some(allowed), "{name}: {worst:?}");
        let spread = pillows.iter().max().zip(pillows.iter().min()).map(|(a, b)| a - b);
        assert!(spread > Some(100), "{name}: {spread:?}");
    }
    // its own size is left alone: the third value of the first pixel is blue 70 of the chessboard
    assert_eq!(bytes("picture.png", 30, 44)[..3], [127, 0, 70]);
}

#[test]
fn broken_files_are_refused_by_name() {
    let folder = tempfile::tempdir().expect("folder");
    let refused = |path: &Path| match Picture::read(path) {
        Err(error @ VideoError::Picture { .. }) => error.to_string(),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("{} was read", path.display()),
    };
    assert!(refused(&folder.path().join("absent.png")).contains("absent.png"));
    for name in ["picture.png", "picture.jpg"] {
        let whole = std::fs::read(fixture(name)).expect("readable");
        for length in [0, 1, 3, 9, 40, whole.len() / 2] {
            let path = folder.path().join(format!("{length}-{name}"));
            std::fs::write(&path, &whole[..length]).expect("written");
            // half of a JPEG may still be one: decoders fill the rest with grey
            if name.ends_with("png") || length <= 40 {
                assert!(refused(&path).contains(name), "{length}");
            }
        }
    }
    let text = folder.path().join("text.png");
    std::fs::write(&text, "hello").expect("written");
    assert!(refused(&text).contains("neither PNG nor JPEG"));
}
