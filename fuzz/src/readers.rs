//! What reads files, on valid files that a script has edited. Each must read them or refuse them.

use crate::checkpoint::{Checkpoint, Saved, State, save};
use crate::config::{Config, OptimizerKind};
use crate::data::folder::read_picture;
use crate::data::images::{Images, add_binary, add_rows, labelled, parse_idx};
use crate::data::speech::{BANDS, features, labels, number_states, samples, sounds};
use crate::history::{History, LayerInfo, Seconds, Sums};
use crate::optimizer::Optimizer;
use crate::{Learners, edit, fix_frame, inspect};
use adacomp::{Compressor, Parameter};
use adacomp_exchange::{Exchange, Local, Shared, Strategy, StrategyChoice};
use fastrand::Rng;
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use image::{DynamicImage, ImageFormat};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::io::{Cursor, Write};
use std::path::Path;
use std::sync::LazyLock;

/// An idx file of two pictures of 3x4: plain, packed, and packed in blocks that are only stored, so that edits reach the contents.
static IDX: LazyLock<[Vec<u8>; 3]> = LazyLock::new(|| {
    let header = [0x0803u32, 2, 3, 4].map(u32::to_be_bytes);
    let plain = [header.as_flattened(), &[7; 24]].concat();
    let [fast, none] = [Compression::fast(), Compression::none()].map(|level| {
        let mut packed = GzEncoder::new(Vec::new(), level);
        packed.write_all(&plain).expect("memory");
        packed.finish().expect("memory")
    });
    [plain, fast, none]
});

/// An idx file, plain or packed.
pub fn idx(data: &[u8]) {
    let Some((&how, script)) = data.split_first() else { return };
    let form = usize::from(how % 3);
    let mut bytes = IDX[form].clone();
    let changed = edit(&mut bytes, script);
    let parsed = match form {
        0 => parse_idx::<3>(&bytes[..]),
        _ => parse_idx::<3>(GzDecoder::new(&bytes[..])),
    };
    match parsed {
        Ok((dimensions, data)) => assert_eq!(dimensions.iter().product::<usize>(), data.len()),
        Err(_) => assert!(changed),
    }
}

/// Pictures in several formats and shapes; the last is of CIFAR-10's form, with two pictures.
static PICTURES: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let plain = DynamicImage::new_rgb8(7, 5);
    let forms = [
        (plain.clone(), ImageFormat::Png),
        (plain.clone(), ImageFormat::Jpeg),
        (DynamicImage::new_luma8(40, 1), ImageFormat::Jpeg),
        (DynamicImage::new_luma_a16(1, 40), ImageFormat::Png),
        (DynamicImage::new_rgb8(1024, 2), ImageFormat::Png),
    ];
    let written = forms.map(|(picture, format)| {
        let mut bytes = Cursor::new(Vec::new());
        picture.write_to(&mut bytes, format).expect("a valid picture");
        bytes.into_inner()
    });
    written.into()
});

/// A picture of a folder, cut and scaled.
pub fn pictures(data: &[u8]) {
    let Some((&how, script)) = data.split_first() else { return };
    let mut bytes = PICTURES[usize::from(how) % PICTURES.len()].clone();
    let changed = edit(&mut bytes, script);
    let random = (how & 128 != 0).then(|| Rng::with_seed(u64::from(how)));
    // Smaller than models take them, and few that are large, which would take nearly all of the time.
    let most = if script.len() % 64 == 0 { 1 << 22 } else { 1 << 16 };
    match read_picture(&bytes, random, 8, most) {
        Ok(cut) => assert_eq!(cut.dimensions(), (8, 8)),
        Err(_) => assert!(changed),
    }
}

/// CIFAR-10 in both forms, with two pictures a file.
pub fn cifar(data: &[u8]) {
    let Some((&how, script)) = data.split_first() else { return };
    let mut list = b"[3, 9]".to_vec();
    let mut bytes = if how & 1 == 0 { vec![3; 2 * 3073] } else { PICTURES[4].clone() };
    let changed = edit(if how & 2 == 0 { &mut bytes } else { &mut list }, script);
    let images = if how & 1 == 0 {
        let mut images = Images::new(3, 32, Vec::new(), Vec::new());
        add_binary(&mut images, &bytes, 2).map(|()| images)
    } else {
        let mut pixels = Vec::new();
        add_rows(&mut pixels, &bytes, 2).and_then(|()| labelled(pixels, &list))
    };
    assert!(changed || images.is_ok());
}

/// An utterance of three frames, and its labels.
pub fn speech(data: &[u8]) {
    static WAV: LazyLock<Vec<u8>> = LazyLock::new(|| {
        let sample_format = hound::SampleFormat::Int;
        let spec = hound::WavSpec { channels: 1, sample_rate: 16_000, bits_per_sample: 16, sample_format };
        let mut bytes = Cursor::new(Vec::new());
        let mut writer = hound::WavWriter::new(&mut bytes, spec).expect("memory");
        (0..720).for_each(|at| writer.write_sample((at * 37 % 256) as i16).expect("memory"));
        writer.finalize().expect("memory");
        bytes.into_inner()
    });
    let Some((&how, script)) = data.split_first() else { return };
    let (mut wav, mut lab) = (WAV.clone(), b"header\n#\n0.01 125 pau\n0.02 125 a ; more\n".to_vec());
    let changed = edit(if how & 1 == 0 { &mut wav } else { &mut lab }, script);
    let (Ok(samples), Ok(labels)) = (samples(&wav), labels(&lab)) else { return assert!(changed) };
    // They take most of the time.
    let frames = if how & 12 == 0 {
        let features = features(&samples);
        assert!(features.iter().all(|value| value.is_finite()));
        features.len() / BANDS
    } else {
        3
    };
    if labels.is_empty() {
        return;
    }
    let sounds = sounds(frames, &labels);
    let counts = sounds.iter().map(|sound| (*sound, 1)).collect();
    let (numbers, states) = number_states(&counts).expect("few sounds");
    assert!(sounds.iter().all(|sound| usize::from(numbers[sound]) < states));
}

/// A state file or a frame, as `inspect` describes it.
pub fn described(data: &[u8]) {
    static FILES: LazyLock<[Vec<u8>; 2]> = LazyLock::new(|| {
        let mut all = Learners::new(1, Strategy::Gather);
        let _ = all.good_step();
        let mut compressor: Compressor = all.0[0].compressor(0).expect("hosted").clone();
        let gradients: Vec<Vec<f32>> =
            crate::LAYOUT.layers().iter().map(|layer| vec![1.5; layer.elements()]).collect();
        for (layer, gradient) in gradients.iter().enumerate() {
            compressor.compress_layer(layer, gradient.as_slice().into(), Default::default()).expect("valid");
        }
        let mut frame = Vec::new();
        compressor.encode(adacomp::Codec::Rice, 0, 1, &mut frame).expect("valid");
        [all.0[0].save().expect("between steps").remove(0).residuals, frame]
    });
    let Some((&how, script)) = data.split_first() else { return };
    let mut bytes = FILES[usize::from(how & 1)].clone();
    let changed = edit(&mut bytes, script);
    if how & 2 != 0 {
        fix_frame(&mut bytes, None);
    }
    match inspect::file(&bytes) {
        Ok(text) => assert!(!text.chars().any(|character| character.is_control() && character != '\n')),
        Err(_) => assert!(changed || how & 3 == 2),
    }
}

/// A run of two learners with owners, saved.
struct SavedRun {
    folder: tempfile::TempDir,
    config: Config,
    parameters: Vec<Parameter>,
    /// The files of its checkpoint by their names, `run.json` first.
    files: Vec<(String, Vec<u8>)>,
    /// The values of `run.json`.
    json: Value,
    /// One, two and three learners that go on from it.
    learners: RefCell<[Exchange<Local>; 3]>,
}

const CHECKPOINT: &str = "checkpoint-00000003";

impl SavedRun {
    fn new() -> Self {
        let strategy = StrategyChoice::Given(Strategy::Sharded);
        let config = Config {
            recipe: "digits".to_owned(),
            strategy,
            learners: 2,
            optimizer: OptimizerKind::Adam,
            ..Config::default()
        };
        let parameters = vec![Parameter::new("fc", &[40, 30]), Parameter::new("bias", &[3])];
        let mut exchange = connect(&config, &parameters);
        let layers: Vec<_> = exchange.layout().layers().iter().map(LayerInfo::from).collect();
        let weights = vec![vec![0.5; 1200], vec![0.25; 3]];
        let sums = Sums::new(2);
        let ratios = json!({ "overall": 9.0, "conv": null, "matrix": 9.0 });
        let total = json!({ "bytes_sent": 1.0, "frame_ratio": ratios, "seconds": 1.0 });
        let seconds = serde_json::to_value(Seconds::default()).expect("numbers");
        let epoch = json!({ "epoch": 1, "step": 2, "learning_rate": 0.1, "train_loss": 1.0, "test_loss": 1.0,
            "test_error": 9.0, "dropped_steps": 1, "bytes_sent": 9.0, "frame_ratio": ratios, "total": total,
            "seconds": seconds, "layers": [{ "frame_ratio": 9.0, "residual_norm": 1.0 }, {}] });
        let state = State {
            step: 3,
            unexchanged: 0,
            dropped_in_a_row: 0,
            optimizers: vec![Optimizer::new(&config, &weights)],
            shared: Shared::new(weights),
            shared_statistics: Vec::new(),
            local: Vec::new(),
            statistics: vec![Vec::new(); 2],
            epoch: vec![sums.clone(); 2],
            before: sums,
            seconds: Seconds::default(),
            history: History { layers, epochs: vec![serde_json::from_value(epoch).expect("an epoch")] },
        };
        // In memory, where there is such a place.
        let memory = Path::new("/dev/shm");
        let folder = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
        let folder = folder.expect("a folder");
        save(folder.path(), &config, [&parameters, &[]], &state, &[], &mut exchange)
            .expect("it can be saved");
        let entries = std::fs::read_dir(folder.path().join(CHECKPOINT)).expect("the checkpoint");
        let read = |path: &Path| std::fs::read(path).expect("it can be read");
        let files = entries.map(|entry| entry.expect("an entry").path());
        let mut files: Vec<_> = files
            .map(|path| (path.file_name().expect("a name").to_string_lossy().into_owned(), read(&path)))
            .collect();
        files.sort_by_key(|(name, _)| (name != "run.json", name.clone()));
        let json = serde_json::from_slice(&files[0].1).expect("valid");
        let learners = [1, 2, 3].map(|learners| connect(&Config { learners, ..config.clone() }, &parameters));
        Self { folder, config, parameters, files, json, learners: learners.into() }
    }
}

fn connect(config: &Config, parameters: &[Parameter]) -> Exchange<Local> {
    let layout = config.policy().layout(parameters.to_vec()).expect("a valid layout");
    let options = config.options(&layout, StrategyChoice::Auto);
    Exchange::new(Local::alone(config.learners), layout, options).expect("all learners are here")
}

/// Values that are likely to be wrong in any place.
fn odd_value(number: u8) -> Value {
    let odd = [
        json!(null),
        json!(0),
        json!(1),
        json!(-1),
        json!(u64::MAX),
        json!(1e308),
        json!(""),
        json!("\u{1b}[2J"),
        json!([]),
        json!({}),
        json!([{}]),
        json!(true),
    ];
    odd[usize::from(number) % odd.len()].clone()
}

/// Replaces or removes values, two bytes an edit: which of all in the tree, and what by.
fn edit_values(run: &mut Value, script: &[u8]) {
    /// Returns whether the edit has been made.
    fn walk(value: &mut Value, count: &mut usize, at: usize, what: u8) -> bool {
        let before = *count;
        let mut edit = |child: &mut Value| {
            *count += 1;
            if *count > at {
                *child = odd_value(what);
                return true;
            }
            walk(child, count, at, what)
        };
        match value {
            Value::Object(members) if what & 128 != 0 && (before..before + members.len()).contains(&at) => {
                let name = members.keys().nth(at - before).expect("there are as many").clone();
                members.remove(&name).is_some()
            }
            Value::Object(members) => members.values_mut().any(&mut edit),
            Value::Array(items) => items.iter_mut().any(edit),
            _ => false,
        }
    }
    for &[at, what] in script.as_chunks().0 {
        walk(run, &mut 0, usize::from(at), what);
    }
}

/// A checkpoint with one edited file, and checksums that fit.
pub fn checkpoint(data: &[u8]) {
    thread_local! {
        static RUN: SavedRun = SavedRun::new();
    }
    let Some((&[how, which], script)) = data.split_first_chunk() else { return };
    RUN.with(|run| {
        let folder = run.folder.path().join(CHECKPOINT);
        let mut other = None;
        let text = if how & 1 == 0 {
            let mut json = run.json.clone();
            edit_values(&mut json, script);
            sealed(json)
        } else if how & 2 == 0 {
            let mut text = run.files[0].1.clone();
            edit(&mut text, script);
            if how & 4 != 0 { seal_bytes(&text) } else { text }
        } else {
            let (name, mut bytes) = run.files[1 + usize::from(which) % (run.files.len() - 1)].clone();
            edit(&mut bytes, script);
            let mut json = run.json.clone();
            json["files"][&name] = format!("{:08x}", crc32fast::hash(&bytes)).into();
            other = Some((name, bytes));
            sealed(json)
        };
        if Saved::read(&text).is_err() {
            return;
        }
        let write = |name: &str, bytes: &[u8]| std::fs::write(folder.join(name), bytes).expect("room");
        write("run.json", &text);
        other.iter().for_each(|(name, bytes)| write(name, bytes));
        if let Ok(checkpoint) = Checkpoint::open(&folder) {
            let learners = 1 + usize::from(how >> 3) % 3;
            let config = Config { learners, ..run.config.clone() };
            let exchange = &mut run.learners.borrow_mut()[learners - 1];
            let loaded = checkpoint.load(&config, &run.parameters, &[], exchange);
            assert!(loaded.is_err() || loaded.is_ok_and(|state| state.shared.weights[0].len() == 1200));
            // It reads all files again.
            if how & 192 == 192 {
                let _ = inspect::describe(&folder);
            }
        }
        write("run.json", &run.files[0].1);
        if let Some((name, _)) = other {
            let good = run.files.iter().find(|(other, _)| *other == name).expect("it is one of them");
            write(&name, &good.1);
        }
    });
}

/// Returns a `run.json` of these values with the right checksum.
fn sealed(mut run: Value) -> Vec<u8> {
    run.as_object_mut().map(|run| run.remove("checksum"));
    let text = run.to_string();
    seal(text.strip_prefix('{').unwrap_or(&text).as_bytes())
}

/// Gives edited bytes the right checksum.
fn seal_bytes(text: &[u8]) -> Vec<u8> {
    let start = text.iter().position(|byte| *byte == b',').map_or(0, |comma| comma + 1);
    seal(&text[start..])
}

fn seal(rest: &[u8]) -> Vec<u8> {
    let front = format!("{{\n  \"checksum\": \"{:08x}\",", crc32fast::hash(rest));
    [front.as_bytes(), rest].concat()
}
