//! Measures the parts of an exchange on this machine.

use crate::data::cache_folder;
use crate::files;
use adacomp::{Averager, Codec, Compressor, Layout, Parameter, Policy, Sending};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::hint::black_box;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::time::Instant;

/// Seconds of the parts that an exchange is made of, while all cores are busy with the like.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Machine {
    /// To copy an element.
    pub(super) copy: f64,
    /// To compress an element in bins of 500, and of 50.
    pub(super) large_bins: f64,
    pub(super) small_bins: f64,
    /// To write an element of the average.
    pub(super) write: f64,
    /// To encode or decode a selected element.
    pub(super) code: f64,
    /// To send or receive a byte, beside what the link takes.
    pub(super) byte: f64,
    /// To start a collective call and to be told of its end.
    pub(super) transport: f64,
}

/// A processor of 2021 at work on all of its cores, for machines that have not been measured.
impl Default for Machine {
    fn default() -> Self {
        Self {
            copy: 0.62e-9,
            large_bins: 0.8e-9,
            small_bins: 1.3e-9,
            write: 0.5e-9,
            code: 6e-9,
            byte: 0.5e-9,
            transport: 2e-3,
        }
    }
}

/// Elements that are measured with: more than caches hold.
const ELEMENTS: usize = 1 << 23;
/// Measurements, of which the median counts.
const TIMES: usize = 7;
/// Threads that measure at once, which is enough to keep the memory busy.
const MOST_THREADS: usize = 16;
/// Bytes that are sent to measure that.
const BYTES: usize = 64 << 20;

impl Machine {
    /// Returns what was measured on this machine, if it was.
    pub(super) fn measured() -> Result<Option<Self>> {
        let path = Self::file()?;
        match std::fs::read_to_string(&path) {
            Ok(text) => {
                let damaged = || format!("{} is damaged: measure again with --calibrate", path.display());
                Ok(Some(serde_json::from_str(&text).with_context(damaged)?))
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
        }
    }

    /// Returns the file that it is kept in.
    pub(super) fn file() -> Result<PathBuf> {
        Ok(cache_folder()?.join("machine.json"))
    }

    /// Measures, with all cores busy, and keeps it for the next time.
    pub(super) fn calibrate() -> Result<Self> {
        let path = Self::file()?;
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS);
        let one = |_| std::thread::spawn(Self::measure);
        let threads: Vec<_> = (0..cores).map(one).collect();
        let measured = threads.into_iter().map(|thread| thread.join().expect("measuring does not panic"));
        let measured = measured.collect::<Result<Vec<_>>>()?;
        let median = |part: fn(&Self) -> f64| median(measured.iter().map(part).collect());
        let machine = Self {
            copy: median(|machine| machine.copy),
            large_bins: median(|machine| machine.large_bins),
            small_bins: median(|machine| machine.small_bins),
            write: median(|machine| machine.write),
            code: median(|machine| machine.code),
            byte: median(|machine| machine.byte),
            transport: median(|machine| machine.transport),
        };
        files::write_atomically(&path, serde_json::to_string_pretty(&machine)?.as_bytes())?;
        Ok(machine)
    }

    fn measure() -> Result<Self> {
        let [large_bins, _, write] = compression(500)?;
        let [small_bins, code, _] = compression(50)?;
        let (from, mut to) = (vec![1.0f32; ELEMENTS], vec![0.0f32; ELEMENTS]);
        let copy = time(|| to.copy_from_slice(black_box(&from)));
        let (byte, transport) = sending()?;
        Ok(Self {
            copy: copy / ELEMENTS as f64,
            large_bins: large_bins / ELEMENTS as f64,
            small_bins: small_bins / ELEMENTS as f64,
            write: write / ELEMENTS as f64,
            code,
            byte,
            transport,
        })
    }
}

/// Returns the seconds to compress, to encode or decode one selected element, and to write the average.
fn compression(bin: u32) -> Result<[f64; 3]> {
    let parameter = Parameter::new("w", &[ELEMENTS]);
    let policy = Policy::adacomp().for_name("w", adacomp::Treatment::Bins(bin));
    let layout: std::sync::Arc<Layout> = policy.layout([parameter])?.into();
    let (mut compressor, mut averager) = (Compressor::new(layout.clone()), Averager::new(layout));
    let mut random = fastrand::Rng::with_seed(u64::from(bin));
    // Tails as heavy as gradients have them. A gradient that is the same in each step would be selected from too often, so
    // each step begins elsewhere in it.
    let gradient = (0..ELEMENTS + TIMES * 1000).map(|_| (random.f32() - 0.5).powi(5));
    let gradient: Vec<f32> = gradient.collect();
    let (mut frame, mut output) = (Vec::new(), vec![0.0f32; ELEMENTS]);
    let mut parts: [Vec<f64>; 3] = Default::default();
    for step in 0..TIMES {
        let gradient = &gradient[1000 * step..][..ELEMENTS];
        let start = Instant::now();
        compressor.compress_layer(0, gradient.into(), Sending::Compressed)?;
        parts[0].push(start.elapsed().as_secs_f64());
        let selected = compressor.layer_statistics(0).selected.max(1);
        let start = Instant::now();
        compressor.encode(Codec::Rice, 0, step as u64, &mut frame)?;
        let _ = averager.check(step as u64, std::slice::from_ref(&frame))?;
        parts[1].push(start.elapsed().as_secs_f64() / (2 * selected) as f64);
        let start = Instant::now();
        averager.write(&mut [output.as_mut_slice()])?;
        parts[2].push(start.elapsed().as_secs_f64());
        compressor.commit()?;
    }
    Ok(parts.map(median))
}

/// Returns the seconds for a byte that goes through the loopback interface, and for an answer to come back, at each end.
fn sending() -> Result<(f64, f64)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut near = TcpStream::connect(listener.local_addr()?)?;
    let (mut far, _) = listener.accept()?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    let echo = std::thread::spawn(move || -> std::io::Result<()> {
        let mut buffer = vec![0; 1 << 20];
        for _ in 0..BYTES / buffer.len() {
            far.read_exact(&mut buffer)?;
        }
        far.write_all(&[0])?;
        for _ in 0..TIMES {
            far.read_exact(&mut buffer[..1])?;
            far.write_all(&[0])?;
        }
        Ok(())
    });
    let chunk = vec![0; 1 << 20];
    let start = Instant::now();
    for _ in 0..BYTES / chunk.len() {
        near.write_all(&chunk)?;
    }
    near.read_exact(&mut [0])?;
    let bytes = start.elapsed().as_secs_f64();
    let mut answers = Vec::new();
    for _ in 0..TIMES {
        let start = Instant::now();
        near.write_all(&[0])?;
        near.read_exact(&mut [0])?;
        answers.push(start.elapsed().as_secs_f64());
    }
    echo.join().expect("the other end does not panic")?;
    // Both ends are here, so each has half. A collective call has a thread of its own at each end, and passes between them several
    // times.
    Ok((0.5 * bytes / BYTES as f64, 10.0 * median(answers)))
}

fn time(mut work: impl FnMut()) -> f64 {
    let once = |_| {
        let start = Instant::now();
        work();
        start.elapsed().as_secs_f64()
    };
    median((0..TIMES).map(once).collect())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
