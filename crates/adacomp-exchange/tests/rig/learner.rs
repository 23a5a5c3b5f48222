//! The program that `tests/mpi.rs` runs, and ends at awkward moments: steps with made-up gradients, the same on every
//! transport. Prints a checksum of the last averaged gradient and of each learner's residuals.
//!
//! `exchange-learner threads 4 --strategy reduce` or `mpirun -n 4 exchange-learner mpi --strategy reduce`.

use adacomp::{Gradient, Outcome, Parameter, Policy};
use adacomp_exchange::{
    Exchange, ExchangeError, LearnerState, Messages, Strategy, TIMEOUT, Threads, Transport, TransportError,
};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

#[path = "../exchange/draw.rs"]
mod draw;

struct Settings {
    transport: String,
    learners: usize,
    strategies: Vec<Strategy>,
    steps: u64,
    /// Elements of the large layer.
    elements: usize,
    timeout: Duration,
    /// Learner and step at which to stop and wait to be killed, and in which phase.
    stop: Option<(usize, u64, String)>,
    /// Where to save the state after each step, and load it from.
    state: Option<PathBuf>,
    /// A learner that is started with another policy.
    differ: Option<usize>,
}

fn main() -> ExitCode {
    let settings = match read(std::env::args().skip(1)) {
        Ok(settings) => settings,
        Err(error) => {
            eprintln!("{error}\nsee the top of tests/rig/learner.rs");
            return ExitCode::from(2);
        }
    };
    match run(&settings) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // In one piece, because other learners may be writing to the same terminal.
            let line = format!("{error}\n");
            eprint!("{line}");
            ExitCode::FAILURE
        }
    }
}

fn read(mut arguments: impl Iterator<Item = String>) -> Result<Settings, String> {
    let mut settings = Settings {
        transport: arguments.next().ok_or("no transport given: threads or mpi")?,
        learners: 4,
        strategies: Strategy::ALL.to_vec(),
        steps: 20,
        elements: 20_000,
        timeout: TIMEOUT,
        stop: None,
        state: None,
        differ: None,
    };
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("no value for {argument}"));
        let number = |text: String| text.parse::<u64>().map_err(|_| format!("`{text}` is not a number"));
        match argument.as_str() {
            "--strategy" => {
                settings.strategies =
                    vec![value()?.parse().map_err(|error: adacomp::UnknownName| error.to_string())?];
            }
            "--steps" => settings.steps = number(value()?)?,
            "--elements" => settings.elements = number(value()?)? as usize,
            "--timeout-ms" => settings.timeout = Duration::from_millis(number(value()?)?),
            "--stop" => settings.stop = Some((number(value()?)? as usize, number(value()?)?, value()?)),
            "--differ" => settings.differ = Some(number(value()?)? as usize),
            "--state" => settings.state = Some(PathBuf::from(value()?)),
            learners => settings.learners = number(learners.to_owned())? as usize,
        }
    }
    Ok(settings)
}

fn run(settings: &Settings) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    match settings.transport.as_str() {
        "threads" => {
            let threads = Threads { learners: settings.learners, threads: 2, timeout: settings.timeout };
            let steps = |strategy| threads.run(|transport| steps(transport, strategy, settings));
            settings.strategies.iter().flat_map(|&strategy| steps(strategy)).collect()
        }
        "mpi" => {
            let mut transport = adacomp_exchange::Mpi::start(settings.timeout)?;
            for &strategy in &settings.strategies {
                steps(&mut transport, strategy, settings)?;
            }
            Ok(())
        }
        other => Err(format!("unknown transport `{other}`").into()),
    }
}

/// A transport that stops its learner once this many rounds have come, before they are looked at.
struct Stopping<C> {
    inner: C,
    stop_after: Option<usize>,
}

impl<C: Transport> Transport for Stopping<C> {
    fn learners(&self) -> usize {
        self.inner.learners()
    }

    fn hosted(&self) -> Range<usize> {
        self.inner.hosted()
    }

    fn start(&mut self, outgoing: Messages) -> Result<(), TransportError> {
        self.inner.start(outgoing)
    }

    fn finish(&mut self) -> Result<Messages, TransportError> {
        let incoming = self.inner.finish();
        self.stop_after = self.stop_after.map(|rounds| rounds - 1);
        if self.stop_after == Some(0) {
            wait_to_be_killed();
        }
        incoming
    }
}

fn wait_to_be_killed() {
    println!("stopped {}", std::process::id());
    std::thread::sleep(Duration::from_secs(600));
}

/// All steps of one strategy; gives the transport back.
fn steps<C: Transport>(
    transport: C,
    strategy: Strategy,
    settings: &Settings,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let parameters = [
        Parameter::new("conv.weight", &[16, 8, 5, 5]),
        Parameter::new("conv.bias", &[16]),
        Parameter::new("fc.weight", &[1, settings.elements]),
        Parameter::new("fc.bias", &[10]),
    ];
    let hosted = transport.hosted();
    let differs = settings.differ.is_some_and(|learner| hosted.contains(&learner));
    let policy = if differs { Policy::local_selection() } else { Policy::adacomp() };
    let layout = policy.layout(parameters)?;
    let lengths: Vec<usize> = layout.layers().iter().map(|layer| layer.elements()).collect();
    let mut exchange = Exchange::new(Stopping { inner: transport, stop_after: None }, layout, strategy)?;
    let mut output: Vec<Vec<f32>> = lengths.iter().map(|&length| vec![0.0; length]).collect();
    let mut checksum = Checksum::default();
    let mut traffic = 0;
    let mut files =
        settings.state.as_ref().map(|folder| StateFiles { folder, strategy, hosted: hosted.clone() });
    if let Some(files) = &mut files {
        files.load(&mut exchange)?;
    }
    for step in exchange.step()..settings.steps {
        let gradients: Vec<Vec<Vec<f32>>> = hosted
            .clone()
            .map(|learner| {
                lengths
                    .iter()
                    .enumerate()
                    .map(|(layer, &length)| draw::gradient(learner, step, layer, length))
                    .collect()
            })
            .collect();
        let stop_phase =
            settings.stop.as_ref().filter(|(learner, at, _)| hosted.contains(learner) && *at == step);
        let stop_phase = stop_phase.map(|(_, _, phase)| phase.as_str());
        let stop = |phase: &str| {
            if stop_phase == Some(phase) {
                wait_to_be_killed();
            }
        };
        stop("compress");
        for (learner, gradients) in hosted.clone().zip(&gradients) {
            for (layer, gradient) in gradients.iter().enumerate().rev() {
                exchange.submit(learner, layer, Gradient::from(gradient.as_slice()))?;
            }
        }
        // The first round is under way now.
        stop("exchange");
        if stop_phase == Some("decode") {
            // All of them but the verdict.
            let rounds = match strategy {
                Strategy::Gather => 1,
                Strategy::Dense | Strategy::Sharded => 2,
                Strategy::Reduce => 3,
            };
            exchange.transport().stop_after = Some(rounds);
        }
        let mut slices: Vec<&mut [f32]> = output.iter_mut().map(Vec::as_mut_slice).collect();
        let outcome: Result<Outcome, ExchangeError> = exchange.finish(&mut slices);
        assert_eq!(outcome?, Outcome::Averaged);
        stop("save");
        // Of the last step only, so that a run that was resumed can be compared.
        checksum = Checksum::default();
        output.iter().flatten().for_each(|value| checksum.add(value.to_bits()));
        traffic += exchange.traffic(hosted.start).map_or(0, |traffic| traffic.sent);
        if let Some(files) = &mut files {
            files.save(&mut exchange)?;
        }
    }
    let mut lines = String::new();
    for learner in hosted.clone() {
        let mut residuals = Checksum::default();
        for layer in 0..lengths.len() {
            let own = exchange
                .compressor(learner)
                .and_then(|compressor| compressor.residual(layer))
                .map(<[f32]>::to_vec);
            let owned = exchange.owner(learner).and_then(|owner| owner.residual(layer)).map(<[f32]>::to_vec);
            own.into_iter().chain(owned).flatten().for_each(|value| residuals.add(value.to_bits()));
        }
        lines += &format!(
            "{} learner {learner} gradients {:016x} residuals {:016x}\n",
            strategy, checksum.0, residuals.0
        );
    }
    if settings.steps > 0 && std::env::var_os("ADACOMP_SHOW_TRAFFIC").is_some() {
        lines += &format!("{} {} sent {traffic}\n", strategy, hosted.start);
    }
    print!("{lines}");
    Ok(())
}

/// The states of the last two steps: a learner may die when others have saved a step and it has not.
struct StateFiles<'a> {
    folder: &'a Path,
    strategy: Strategy,
    hosted: Range<usize>,
}

impl StateFiles<'_> {
    fn path(&self, learner: usize, step: u64, what: &str) -> PathBuf {
        self.folder.join(format!("{}-{learner}-{step}.{what}.safetensors", self.strategy))
    }

    /// Loads the newest step that all learners have.
    fn load<C: Transport>(
        &self,
        exchange: &mut Exchange<C>,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let saved =
            |step: &u64| self.hosted.clone().all(|learner| self.path(learner, *step, "residuals").exists());
        let newest = (1..1000).rev().find(saved).unwrap_or(0);
        let steps = vec![newest.to_le_bytes().to_vec(); self.hosted.len()];
        let steps = exchange.transport().all_gather(steps)?;
        let steps =
            steps.iter().filter_map(|bytes| bytes.first_chunk()).map(|bytes| u64::from_le_bytes(*bytes));
        let step = steps.min().unwrap_or(0);
        if step == 0 {
            return Ok(());
        }
        let states = self.hosted.clone().map(|learner| {
            let residuals = std::fs::read(self.path(learner, step, "residuals"))?;
            let owner = match self.strategy {
                Strategy::Sharded => Some(std::fs::read(self.path(learner, step, "owner"))?),
                _ => None,
            };
            Ok(LearnerState { residuals, owner })
        });
        exchange.load(&states.collect::<std::io::Result<Vec<_>>>()?)?;
        Ok(())
    }

    fn save<C: Transport>(
        &self,
        exchange: &mut Exchange<C>,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let step = exchange.step();
        for (learner, state) in self.hosted.clone().zip(exchange.save()?) {
            let write = |what: &str, bytes: &[u8]| {
                let path = self.path(learner, step, what);
                let temporary = path.with_extension("new");
                std::fs::write(&temporary, bytes)?;
                std::fs::rename(temporary, path)
            };
            // The residuals last: once they are there, the state is complete.
            state.owner.as_ref().map_or(Ok(()), |owner| write("owner", owner))?;
            write("residuals", &state.residuals)?;
            for what in ["residuals", "owner"] {
                let _ = std::fs::remove_file(self.path(learner, step.saturating_sub(2), what));
            }
        }
        Ok(())
    }
}

#[derive(Clone)]
struct Checksum(u64);

impl Default for Checksum {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Checksum {
    fn add(&mut self, word: u32) {
        self.0 = (self.0 ^ u64::from(word)).wrapping_mul(0x0000_0100_0000_01b3);
    }
}
