//! Machines on a common switch, each a network namespace of its own.
//!
//! Everything happens in namespaces for network, mounts and processes that end with this program, so nothing is left behind
//! whatever happens to it, and nothing but these machines can be reached.

use crate::shell::{Result, command, install, root, run};
use std::fs;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Set for the program that runs inside of the namespaces.
const INSIDE: &str = "ADACOMP_INSIDE_NAMESPACES";

/// Whether this is the program that runs inside of the namespaces.
pub(crate) fn is_inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// Has this program run again, with the same words, inside of its own namespaces. Whether it is there already.
pub(crate) fn inside(words: &[&str]) -> Result<bool> {
    if !is_inside() {
        install("tc", &["iproute2"])?;
        let program = std::env::current_exe().map_err(|error| error.to_string())?;
        let mut inside =
            command("unshare", &["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
        let failed = |error| format!("{error}\n(network namespaces need root)");
        run(inside.arg(program).args(words).env(INSIDE, "1")).map_err(failed)?;
        return Ok(false);
    }
    // Names of namespaces are files there.
    fs::create_dir_all("/run/netns").map_err(|error| format!("/run/netns: {error}"))?;
    run(&mut command("mount", &["-t", "tmpfs", "tmpfs", "/run/netns"]))?;
    let file = root().join("target/machines");
    let names = (0..MOST).map(|machine| format!("10.0.0.{} {}\n", machine + 1, name(machine)));
    let names = format!("127.0.0.1 localhost\n{}", names.collect::<String>());
    fs::write(&file, names).map_err(|error| format!("{}: {error}", file.display()))?;
    run(command("mount", &["--bind"]).arg(&file).arg("/etc/hosts"))?;
    ip("link set lo up")?;
    Ok(true)
}

/// Machines whose names are known.
const MOST: usize = 8;

/// A machine's name, which all machines can find its address by.
pub(crate) fn name(machine: usize) -> String {
    format!("machine-{}", machine + 1)
}

/// So many machines, each with an interface `eth`.
pub(crate) struct Machines(usize);

impl Machines {
    /// Machines whose links have this speed in both directions, or any.
    pub(crate) fn new(count: usize, rate: Option<&str>) -> Result<Self> {
        let machines = Self(count);
        ip("netns add switch")?;
        ip("-n switch link add bridge type bridge")?;
        ip("-n switch link set bridge up")?;
        for machine in 0..count {
            let name = name(machine);
            ip(&format!("netns add {name}"))?;
            ip(&format!("link add eth netns {name} type veth peer name port{machine} netns switch"))?;
            ip(&format!("-n switch link set port{machine} master bridge up"))?;
            ip(&format!("-n {name} addr add 10.0.0.{}/24 dev eth", machine + 1))?;
            ip(&format!("-n {name} link set eth up"))?;
            ip(&format!("-n {name} link set lo up"))?;
            if let Some(rate) = rate {
                shape(&name, "eth", rate)?;
                shape("switch", &format!("port{machine}"), rate)?;
            }
        }
        Ok(machines)
    }

    /// A command, without its program, that will run on a machine.
    pub(crate) fn on(&self, machine: usize) -> Command {
        command(
            "ip",
            &["netns", "exec", &name(machine), "unshare", "--uts", "sh", "-c", NAMED, &name(machine)],
        )
    }
}

/// Gives the machine its name, then runs the command.
const NAMED: &str = "hostname \"$0\" && exec \"$@\"";

impl Drop for Machines {
    fn drop(&mut self) {
        let names = (0..self.0).map(name).chain(["switch".to_owned()]);
        for name in names {
            // Links go with their namespaces; whatever is left goes with this program.
            let _ = Command::new("ip").args(["netns", "del", &name]).stderr(Stdio::null()).status();
        }
    }
}

/// Runs commands side by side until all have ended well. If one has not, or it takes too long, all are ended.
pub(crate) fn run_together(commands: Vec<Command>, limit: Duration) -> Result {
    let start = Instant::now();
    let mut running = Vec::new();
    for mut command in commands {
        running.push(Running(command.spawn().map_err(|error| format!("{command:?}: {error}"))?));
    }
    loop {
        let states: Vec<_> = running.iter_mut().map(|running| running.0.try_wait()).collect();
        let is_well = |state: &&_| matches!(state, Ok(Some(status)) if ExitStatus::success(status));
        if states.iter().all(|state| is_well(&state)) {
            return Ok(());
        }
        if let Some(bad) = states.iter().find(|state| !matches!(state, Ok(None)) && !is_well(state)) {
            return Err(format!("one of {} processes: {bad:?}", states.len()));
        }
        if start.elapsed() > limit {
            return Err(format!("{} processes took more than {limit:?}", states.len()));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// A process that does not outlive its run.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn ip(words: &str) -> Result {
    run(&mut command("ip", &words.split(' ').collect::<Vec<_>>()))
}

/// Gives what an interface sends this speed. What may go at once is some milliseconds' worth: with more, a slow link would save up
/// during the computing of a step for a good part of its messages. With less than 64 kB the kernel cuts what it sends into real
/// packets before, which takes the processor long at all but the lowest speed.
fn shape(namespace: &str, interface: &str, rate: &str) -> Result {
    let burst = match rate {
        "10mbit" => "16kb",
        "100mbit" => "68kb",
        _ => "256kb",
    };
    let words = format!("qdisc add dev {interface} root tbf rate {rate} burst {burst} latency 50ms");
    run(command("tc", &["-n", namespace]).args(words.split(' ')))
}
