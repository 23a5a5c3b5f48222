//! A speech corpus as frames and states: log-mel features, each with a third of a phone in its context.

mod features;

use super::{Batch, Data, Samples};
use crate::draw::Draw;
use crate::files;
use crate::show;
use anyhow::{Context, Result, bail, ensure};
pub(crate) use features::{BANDS, Sound, features, number_states, sounds};
use indicatif::ProgressBar;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, thread};

/// Samples a second.
const RATE: u32 = 16_000;
/// Frames that a window has on either side.
const AROUND: usize = 5;
/// Every tenth utterance is for tests.
const TEST: usize = 10;

/// Frames, numbered from the first utterance to the last.
#[derive(Default)]
struct Utterances {
    /// Of each utterance apart, as they were read, to hold them only once.
    features: Vec<Vec<f32>>,
    starts: Vec<usize>,
    states: Vec<u16>,
}

impl Samples for Utterances {
    fn len(&self) -> usize {
        self.states.len()
    }

    /// Adds the 440 inputs of a frame: 11 frames of 40, the edges of its utterance repeated.
    fn add(&self, frame: usize, _draw: Option<Draw>, batch: &mut Batch) -> Result<()> {
        batch.targets.push(i32::from(self.states[frame]));
        let next = self.starts.partition_point(|&start| start <= frame);
        let (features, frame) = (&self.features[next - 1], frame - self.starts[next - 1]);
        for near in frame..=frame + 2 * AROUND {
            let near = near.saturating_sub(AROUND).min(features.len() / BANDS - 1);
            batch.values.extend_from_slice(&features[near * BANDS..][..BANDS]);
        }
        Ok(())
    }
}

/// Loads the first corpus in `folder`, with a bar for its progress.
pub(super) fn load(folder: &Path) -> Result<Data> {
    let bar = show::bar("computing speech features");
    let (train, test, classes) = read_corpus(folder, &bar)?;
    bar.finish_and_clear();
    Ok(Data { train: Box::new(train), test: Box::new(test), classes })
}

/// Reads the first corpus in `folder`: a folder `wav` beside a folder `lab`, there or anywhere below. Returns frames for
/// training and for testing, and the number of states.
fn read_corpus(folder: &Path, bar: &ProgressBar) -> Result<(Utterances, Utterances, usize)> {
    let Some(found) = find(folder)? else {
        bail!("no folder `wav` beside a folder `lab` in {}: unpack the corpus there", folder.display());
    };
    pairs(&found, "lab", "wav")?;
    let utterances = read_all(&pairs(&found, "wav", "lab")?, bar)?;
    let (features, labels): (Vec<_>, Vec<_>) = utterances.into_iter().unzip();
    let sounds =
        features.iter().zip(&labels).map(|(features, labels)| sounds(features.len() / BANDS, labels));
    let sounds: Vec<Vec<Sound>> = sounds.collect();
    let (numbers, states) = number_states(&count(&sounds))?;
    let (mut train, mut test) = (Utterances::default(), Utterances::default());
    for (index, (features, sounds)) in features.into_iter().zip(sounds).enumerate() {
        let part = if is_test(index) { &mut test } else { &mut train };
        part.starts.push(part.len());
        part.features.push(features);
        part.states.extend(sounds.iter().map(|sound| numbers[sound]));
    }
    let enough = train.len() > 0 && test.len() > 0;
    ensure!(enough, "{} has too little sound: add utterances, at least {TEST} in all", found.display());
    normalise(&mut train, &mut test);
    Ok((train, test, states))
}

fn is_test(index: usize) -> bool {
    index % TEST == TEST - 1
}

fn find(folder: &Path) -> Result<Option<PathBuf>> {
    if folder.join("wav").is_dir() && folder.join("lab").is_dir() {
        return Ok(Some(folder.to_owned()));
    }
    // Links are not followed, as they may lead back.
    let inner = list(folder)?.into_iter().filter(|path| path.is_dir() && !path.is_symlink());
    inner.map(|path| find(&path)).find(|found| !matches!(found, Ok(None))).unwrap_or(Ok(None))
}

/// Returns the contents of a folder, sorted.
fn list(folder: &Path) -> Result<Vec<PathBuf>> {
    let paths = fs::read_dir(folder).and_then(|all| all.map(|entry| Ok(entry?.path())).collect());
    let mut paths: Vec<PathBuf> =
        paths.with_context(|| format!("cannot list {}: name a folder that can be read", folder.display()))?;
    paths.sort();
    Ok(paths)
}

/// Returns the files of one kind, each with the file of the other kind that belongs to it.
fn pairs(folder: &Path, kind: &str, other: &str) -> Result<Vec<(PathBuf, PathBuf)>> {
    let paths = list(&folder.join(kind))?.into_iter();
    let wanted = paths.filter(|path| path.extension().is_some_and(|extension| extension == kind));
    let pair = |path: PathBuf| {
        let partner = folder.join(other).join(path.file_name()?).with_extension(other);
        Some((path, partner))
    };
    let pairs: Vec<_> = wanted.filter_map(pair).collect();
    if let Some((path, partner)) = pairs.iter().find(|(_, partner)| !partner.is_file()) {
        bail!("{} has no {}: add that or remove the former", path.display(), partner.display());
    }
    Ok(pairs)
}

/// Phones, each with the sample before which it ends.
pub(crate) type Labels = Vec<(usize, String)>;
type Utterance = (Vec<f32>, Labels);

/// Reads on all cores. Results are in order, so the error is always the same, too.
fn read_all(pairs: &[(PathBuf, PathBuf)], bar: &ProgressBar) -> Result<Vec<Utterance>> {
    let threads = thread::available_parallelism().map_or(1, |cores| cores.get());
    bar.set_length(pairs.len() as u64);
    let read_part = &|first: usize| {
        let part = pairs.iter().skip(first).step_by(threads);
        part.map(|(wav, lab)| read(wav, lab)).inspect(|_| bar.inc(1)).collect::<Vec<_>>().into_iter()
    };
    let mut parts: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|first| scope.spawn(move || read_part(first))).collect();
        workers.into_iter().map(|worker| worker.join().expect("reading does not panic")).collect()
    });
    (0..pairs.len()).filter_map(|index| parts[index % threads].next()).collect()
}

fn read(wav: &Path, lab: &Path) -> Result<Utterance> {
    let samples = samples(&files::read(wav)?).with_context(|| wav.display().to_string())?;
    let labels = labels(&files::read(lab)?).with_context(|| lab.display().to_string())?;
    let features = features(&samples);
    let labelled = !labels.is_empty() || features.is_empty();
    ensure!(labelled, "{} has no labels: remove it and its wav", lab.display());
    Ok((features, labels))
}

/// Reads a wav file.
pub(crate) fn samples(bytes: &[u8]) -> Result<Vec<i16>> {
    let reader =
        hound::WavReader::new(bytes).context("it cannot be read as a wav file: unpack the corpus again")?;
    let hound::WavSpec { channels, bits_per_sample, sample_format, sample_rate } = reader.spec();
    let plain = (channels, bits_per_sample, sample_format) == (1, 16, hound::SampleFormat::Int);
    ensure!(plain, "it is not 16-bit mono PCM: convert it");
    ensure!(sample_rate == RATE, "it has {sample_rate} samples a second: resample it to {RATE}");
    let samples = reader.into_samples().collect::<hound::Result<_>>();
    samples.context("it is truncated: unpack the corpus again")
}

/// Reads a lab file.
pub(crate) fn labels(bytes: &[u8]) -> Result<Labels> {
    // The header may be in any encoding.
    let text = String::from_utf8_lossy(bytes);
    let mut lines = text.lines().map(str::trim).zip(1..);
    ensure!(lines.any(|(line, _)| line == "#"), "it has no line `#`: put one before the labels");
    let (mut labels, mut start) = (Vec::new(), 0.0);
    for (line, number) in lines.filter(|(line, _)| !line.is_empty()) {
        let Some((end, phone)) = label(line) else {
            bail!("line {number}: `{line}` is no label: write an end time, a colour and a phone");
        };
        ensure!(end > start, "line {number}: {end} s is not after {start} s: correct the times");
        labels.push(((end * f64::from(RATE)).round() as usize, phone.to_owned()));
        start = end;
    }
    Ok(labels)
}

/// Returns the end time and the phone in a line. More may follow after a semicolon.
fn label(line: &str) -> Option<(f64, &str)> {
    let words: Vec<&str> = line.split(';').next()?.split_whitespace().collect();
    let [end, colour, phone] = words[..] else { return None };
    colour.parse::<i32>().ok()?;
    end.parse().ok().filter(|end: &f64| end.is_finite()).map(|end| (end, phone))
}

/// Gives each band of the train features mean 0 and variance 1, and treats the test features alike.
fn normalise(train: &mut Utterances, test: &mut Utterances) {
    let frames = train.len() as f64;
    for band in 0..BANDS {
        let bands = train.features.iter().flat_map(|features| features.iter().skip(band).step_by(BANDS));
        let values = bands.map(|&value| f64::from(value));
        let mean = values.clone().sum::<f64>() / frames;
        let variance = values.map(|value| (value - mean).powi(2)).sum::<f64>() / frames;
        let deviation = variance.sqrt().max(1e-6); // not 0, where there is no sound at all
        for features in train.features.iter_mut().chain(&mut test.features) {
            for value in features.iter_mut().skip(band).step_by(BANDS) {
                *value = ((f64::from(*value) - mean) / deviation) as f32;
            }
        }
    }
}

/// Counts the training frames of each sound; 0 for those that only the test has.
fn count<'a>(sounds: &[Vec<Sound<'a>>]) -> BTreeMap<Sound<'a>, usize> {
    let mut counts = BTreeMap::new();
    for (index, sounds) in sounds.iter().enumerate() {
        for sound in sounds {
            *counts.entry(*sound).or_default() += usize::from(!is_test(index));
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    /// Returns a folder with a corpus of noise somewhere below.
    fn corpus() -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("voice/wav")).unwrap();
        fs::create_dir_all(folder.path().join("voice/lab")).unwrap();
        for index in 0..11 {
            let noise = (0..4000 + 160 * index).map(|at: u32| (at.wrapping_mul(2_654_435_769) >> 20) as i16);
            write_wav(&wav(&folder, index), RATE, noise);
            fs::write(lab(&folder, index), "any header\n#\n0.1 125 pau\n0.2 125 a ; more\n").unwrap();
        }
        folder
    }

    fn wav(folder: &TempDir, index: u32) -> PathBuf {
        folder.path().join(format!("voice/wav/u{index:02}.wav"))
    }

    fn lab(folder: &TempDir, index: u32) -> PathBuf {
        folder.path().join(format!("voice/lab/u{index:02}.lab"))
    }

    fn write_wav(path: &Path, sample_rate: u32, samples: impl IntoIterator<Item = i16>) {
        let sample_format = hound::SampleFormat::Int;
        let spec = hound::WavSpec { channels: 1, sample_rate, bits_per_sample: 16, sample_format };
        let mut writer = hound::WavWriter::create(path, spec).unwrap();
        samples.into_iter().for_each(|sample| writer.write_sample(sample).unwrap());
        writer.finalize().unwrap();
    }

    #[test]
    fn a_corpus_loads_the_same_twice_and_windows_stay_in_an_utterance() {
        let folder = corpus();
        write_wav(&wav(&folder, 4), RATE, [0; 9]); // too short for a frame
        let [one, two] = [(); 2].map(|()| {
            let bar = ProgressBar::hidden();
            let corpus = read_corpus(folder.path(), &bar).unwrap();
            assert_eq!((bar.position(), bar.length()), (11, Some(11)));
            corpus
        });
        for (one, two) in [(&one.0, &two.0), (&one.1, &two.1)] {
            let bits = |part: &Utterances| part.features.concat().into_iter().map(f32::to_bits).collect();
            let (one_bits, two_bits): (Vec<u32>, Vec<u32>) = (bits(one), bits(two));
            assert_eq!((one_bits, &one.states), (two_bits, &two.states));
        }
        let (train, _, states) = one;
        assert_eq!((states, &train.starts[..7]), (6, &[0, 23, 47, 72, 98, 98, 126][..]));
        let all = train.features.concat();
        let inputs = Batch::of(&train, [23, 95], None).unwrap().values;
        let start = [23, 23, 23, 23, 23, 23, 24, 25, 26, 27, 28];
        let end = [90, 91, 92, 93, 94, 95, 96, 97, 97, 97, 97];
        let expected = start.iter().chain(&end).flat_map(|near| &all[near * BANDS..][..BANDS]);
        assert!(inputs.iter().eq(expected));
    }

    #[test]
    fn errors_name_the_file() {
        let check = |name, expected: &str, damage: &dyn Fn(PathBuf, PathBuf)| {
            let folder = corpus();
            damage(wav(&folder, 3), lab(&folder, 3));
            let error = read_corpus(folder.path(), &ProgressBar::hidden()).err().expect(name);
            let error = format!("{error:#}");
            assert!(error.contains(expected) && !error.contains('\n'), "{error}");
        };
        let labels = |text: &'static str| move |_, lab| fs::write(lab, text).unwrap();
        check("bad", "u03.lab: line 4: `0.2 b`", &labels("#\n0.1 125 a\n\n0.2 b\n"));
        check("times", "u03.lab: line 3: 0.2 s is not after 0.2 s", &labels("#\n0.2 125 a\n0.2 125 b\n"));
        check("unlabelled", "u03.lab has no labels", &labels("#\n"));
        check("rate", "u03.wav: it has 8000", &|wav, _| write_wav(&wav, 8000, [0; 9]));
        check("no-lab", "u03.wav has no ", &|_, lab| fs::remove_file(lab).unwrap());
        check("no-wav", "u03.lab has no ", &|wav, _| fs::remove_file(wav).unwrap());
        check("none", "no folder `wav`", &|_, lab| fs::remove_dir_all(lab.parent().unwrap()).unwrap());
        check("truncated", "u03.wav: it is truncated", &|wav, _| {
            fs::File::options().write(true).open(wav).unwrap().set_len(1000).unwrap();
        });
    }
}
