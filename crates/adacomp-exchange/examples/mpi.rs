//! The averaged gradient of as many processes as MPI starts, and what it cost beside sending it dense.
//!
//! `cargo build -p adacomp-exchange --features mpi --example mpi && mpirun -n 4 target/debug/examples/mpi`

use adacomp::{Parameter, Policy};
use adacomp_exchange::{Exchange, Mpi, Strategy, TIMEOUT, Transport};

const ELEMENTS: usize = 1_000_000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut transport = Mpi::start(TIMEOUT)?;
    let (learner, learners) = (transport.hosted().start, transport.learners());
    let mut random = fastrand::Rng::with_seed(learner as u64);
    for strategy in Strategy::ALL {
        let layout = Policy::adacomp().layout([Parameter::new("weight", &[1000, 1000])])?;
        let mut exchange = Exchange::new(&mut transport, layout, strategy)?;
        let mut average = vec![0.0; ELEMENTS];
        // Residuals take some steps to fill.
        for _ in 0..10 {
            let gradient: Vec<f32> = (0..ELEMENTS).map(|_| (2.0 * random.f32() - 1.0).powi(5)).collect();
            let outcome = exchange.exchange(&[vec![gradient.as_slice().into()]], &mut [&mut average])?;
            assert_eq!(outcome, adacomp::Outcome::Averaged);
        }
        let sent = exchange.traffic(learner).map_or(0, |traffic| traffic.sent);
        if learner == 0 {
            println!("{strategy:>8}: each of {learners} learners sends {sent} bytes in a step");
        }
    }
    Ok(())
}
