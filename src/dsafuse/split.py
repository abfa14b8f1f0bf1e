"""stub"""
def why_not(config, target): return None
def why_not_here(): return None
def run(op, a, config):
    from dsafuse.registry import OPS
    OPS[op].oracle(**a)
